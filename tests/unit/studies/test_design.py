"""Study files: those that come with the package are sound, and wrong ones are refused in one line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from equipoise.config import parse_yaml
from equipoise.errors import UserError
from equipoise.report.reproduction import paper_items
from equipoise.studies.design import Design, packaged_studies, read_study
from equipoise.studies.metrics import MEASURED, METRICS
from equipoise.studies.results import slug
from equipoise.training.build_recipe import make_recipe
from equipoise.training.recipe_files import read_recipe
from train_helpers import tiny

WANTED = {  # seeds of the studies that were run
    "sparsity": [0, 1],
    "table1-standard": [0, 1],
    "set-itop": [0, 1, 2, 3, 4],
    "published": [0, 1, 2, 3, 4],
    "rigl-itop": [0, 1],
    "gamma": [0, 1],
    "fixed-c": [0, 1],
    "at": [0, 1],
    "mvr": [0, 1],
    "digits": [0, 1],
}


@cache
def packaged(name: str) -> Design:
    return read_study(name)


@pytest.mark.parametrize("name", packaged_studies())
def test_every_arm_of_a_packaged_study_is_a_recipe(name: str) -> None:
    design = packaged(name)
    raws = {arm: design.raw(arm, seed) for arm in design.arms for seed in design.seeds}
    assert len({yaml.safe_dump(raw) for raw in raws.values()}) == len(design.arms), "two arms are the same"
    recipes = {arm: make_recipe(raw) for arm, raw in raws.items()}
    assert all(recipe.ema for recipe in recipes.values()), "EMA weights are a fair baseline"
    for value in design.paper:
        assert value.metric in METRICS
        assert value.at is None or value.at <= recipes[value.arm].epochs
        assert 0 < value.value < 1
    for claim in design.claims:
        assert claim.metric in METRICS
        assert claim.better != claim.than
        assert (claim.threshold is not None) == (claim.metric == "epochs-to")
        for arm in (claim.better, claim.than):
            assert claim.at is None or claim.at <= recipes[arm].epochs
        if claim.metric in ("robust", "clean"):
            assert design.robust
        if claim.metric in MEASURED:
            assert design.measure
    places = [(value.arm, value.metric, value.at) for value in design.paper]
    assert len({*places}) == len(places)
    assert len({claim.says for claim in design.claims}) == len(design.claims)


@pytest.mark.parametrize(("name", "seeds"), WANTED.items())
def test_the_studies_that_were_run_keep_their_seeds(name: str, seeds: list[int]) -> None:
    assert list(packaged(name).seeds) == seeds


def test_studies_include_the_fair_baselines() -> None:
    for name in ("set-itop", "rigl-itop"):
        design = packaged(name)
        corrections = {make_recipe(design.raw(arm, 0)).correction.__class__.__name__ for arm in design.arms}
        assert {"SGD", "Agent", "SVRG", "AlphaSVRG", "FixedC"} <= corrections
        plain, bigger = (make_recipe(design.raw(arm, 0)) for arm in ("SGD", "Bigger batch"))
        # as many steps, on batches that cost two gradients
        assert bigger.data.batch * plain.epochs == plain.data.batch * bigger.epochs
        assert {claim.score for claim in design.claims} == {"plain", "bn_recalibrated", "ema"}
    fractions = [packaged("at").raw(arm, 0).get("objective") for arm in packaged("at").arms]
    assert {"name": "at", "clean_fraction": 0.1} in fractions
    assert {packaged("at").raw(arm, 0)["full_pass"] for arm in packaged("at").arms} == {"clean", "adversarial"}


def test_time_to_accuracy_has_all_references_at_fixed_budgets() -> None:
    for name in (name for name in packaged_studies() if name.startswith("time-to-accuracy")):
        design = packaged(name)
        recipes = {arm: make_recipe(design.raw(arm, 0)) for arm in design.arms}
        assert all(arm.endswith(f", {recipe.epochs} epochs") for arm, recipe in recipes.items())
        assert all(any(kind in arm for arm in recipes) for kind in ("fast", "published", "dense"))
        for claim in design.claims:
            assert claim.metric in ("accuracy", "robust", "clean")
            assert claim.at is None  # the final accuracy
            if "published" in claim.than:
                parts = 2 if name.endswith("at") else 3 if "cifar100" in name or "sparsities" in name else 4
                assert parts * recipes[claim.better].epochs <= recipes[claim.than].epochs
    design = packaged("time-to-accuracy")
    assert list(design.seeds) == [0, 1, 2, 3, 4]
    assert make_recipe(design.raw("SET-ITOP published, 50 epochs", 0)) == make_recipe(
        {**read_recipe("vgg_c-set-itop"), "epochs": 50, "seed": 0, **design.set}
    )


def test_the_numbers_of_table_1_agree_with_the_text_of_the_paper() -> None:
    """Its text: up to 11.4 % after 20 epochs, and up to 5.0 % on average over the six budgets."""
    numbers = {(v.arm, v.at): 100 * v.value for v in packaged("table1-standard-200").paper if v.metric == "accuracy"}
    budgets = (20, 40, 70, 90, 140, 200)
    gains = {s: [numbers[f"AGENT {s} %", at] - numbers[f"BSR-Net {s} %", at] for at in budgets] for s in (90, 99)}
    assert max(gains[90][0], gains[99][0]) == pytest.approx(11.4)
    assert max(sum(gain) / 6 for gain in gains.values()) == pytest.approx(5.0, abs=0.05)
    early = {(v.arm, v.at): 100 * v.value for v in packaged("table1-standard").paper}
    assert all(numbers[key] == value for key, value in early.items())
    assert {at for _, at in early} == {20, 40, 70, 90}


def test_the_first_90_of_200_epochs_have_the_same_learning_rates() -> None:
    short, full = (
        make_recipe(packaged(n).raw("BSR-Net 99 %", 0)) for n in ("table1-standard", "table1-standard-200")
    )
    assert (short.epochs, full.epochs) == (90, 200)
    for step in range(0, 90 * 391, 97):
        assert short.schedule.factor(step, 90, 391) == full.schedule.factor(step, 200, 391)


def test_every_table_and_figure_of_the_paper_has_studies_or_a_reason() -> None:
    items = paper_items()
    assert all(item.studies or item.why for item in items)
    others = ("digits", "storage", "precision", "published", "time-to-accuracy", "patterns")
    not_of_the_paper = {name for name in packaged_studies() if name.startswith(others)}
    assert {name for item in items for name in item.studies} == {*packaged_studies()} - not_of_the_paper
    text = " ".join(item.item for item in items)
    assert all(f"Figure {i} " in f"{text} " for i in [*range(1, 16), *range(22, 34)])
    assert "Figures 16 to 21" in text
    assert all(f"Table {i} " in f"{text} " for i in range(1, 12))


# Study files


def write(folder: Path, value: Any) -> str:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    (folder / "own.yaml").write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return str(folder / "own.yaml")


def own(**changes: Any) -> dict[str, Any]:
    return {"title": "T", "recipe": "tiny.yaml", "arms": {"a": {}, "b": {"epochs": 3}}, **changes}


def test_overrides_are_merged_in_order(tmp_path: Path) -> None:
    arms = {
        "nested": {"data": {"batch": 60}, "topology": {"sparsity": 0.5}},
        "dotted": {"data.batch": 60, "topology.sparsity": 0.5},
        "other": {"topology": {"name": "set", "sparsity": 0.5}, "recipe": ["digits", "agent"]},
        "of all": {},
    }
    design = read_study(write(tmp_path, own(arms=arms, set={"epochs": 7, "data.batch": 90})))
    base = tiny()
    expected = {**base, "epochs": 7, "seed": 4, "data": {**base["data"], "batch": 60}}
    expected["topology"] = {**base["topology"], "sparsity": 0.5}
    assert design.raw("nested", 4) == design.raw("dotted", 4) == expected
    assert design.raw("of all", 0)["data"]["batch"] == 90
    other = design.raw("other", 0)
    assert other["topology"] == {"name": "set", "sparsity": 0.5}
    assert other["correction"] == read_recipe("agent")["correction"]
    assert (other["epochs"], other["model"], other["data"]["batch"]) == (7, "small", 90)


def test_study_json_holds_plain_values(tmp_path: Path) -> None:
    claim = {"says": "s", "better": "a", "than": "b", "at": 2}
    asked = read_study(write(tmp_path, own(claims=[claim], seeds=[3]))).to_json()
    assert asked["version"] == 2
    assert asked["name"] == "own"
    assert asked["arms"] == own()["arms"]
    assert {key: asked["claims"][0][key] for key in claim} == claim


def test_every_arm_exists_with_every_budget(tmp_path: Path) -> None:
    claim = {"says": "s", "better": "b, 5 epochs", "than": "a"}
    design = read_study(write(tmp_path, own(budgets=[5, 9], claims=[claim])))
    assert list(design.every_arm) == ["a", "b", "a, 5 epochs", "b, 5 epochs", "a, 9 epochs", "b, 9 epochs"]
    assert [design.raw(arm, 0)["epochs"] for arm in design.every_arm] == [tiny()["epochs"], 3, 5, 5, 9, 9]
    asked = design.to_json()
    assert asked["budgets"] == {f"{arm}, {n} epochs": arm for n in (5, 9) for arm in ("a", "b")}
    assert list(asked["arms"]) == list(design.every_arm)


CLAIM = {"says": "s", "better": "a", "than": "b"}
REFUSED = {
    "unknown key": (own(sedes=[0]), 'no option is called "sedes"; did you mean "seeds"?'),
    "no arms": ({"title": "T"}, "arms is missing"),
    "no title": ({"arms": {"a": {}}}, "title is missing"),
    "empty arms": (own(arms={}), "at least one arm"),
    "no seeds": (own(seeds=[]), "at least one arm and one seed"),
    "seed twice": (own(seeds=[0, 0]), "distinct whole numbers"),
    "negative seed": (own(seeds=[-1]), "at least 0"),
    "seed of an arm": (own(arms={"a": {"seed": 3}}), "the seeds are those of the study"),
    "arm without braces": (own(arms={"a": None}), "expected keys and values"),
    "unknown option": (own(arms={"a": {"epohcs": 3}}), 'no option is called "epohcs"; did you mean "epochs"?'),
    "wrong value": (own(arms={"a": {"epochs": "many"}}), "expected a whole number"),
    "unknown part": (own(arms={"a": {"correction": "agnet"}}), 'did you mean "agent"?'),
    "unknown recipe": (own(recipe="digist"), 'did you mean "digits"?'),
    "recipe of an arm": (own(arms={"a": {"recipe": 3}}), "expected a name or a file"),
    "arms that share files": (own(arms={"A b": {}, "a-b": {}}), "would share their files"),
    "claim about no arm": (own(claims=[{**CLAIM, "than": "c"}]), 'no arm is called "c"'),
    "unknown key of a claim": (own(claims=[{**CLAIM, "then": "b"}]), 'no option is called "then"'),
    "unknown score": (own(claims=[{**CLAIM, "score": "planed"}]), "no score is called"),
    "no epoch 0": (own(claims=[{**CLAIM, "at": 0}]), "epochs count from 1"),
    "epoch of an end": (own(claims=[{**CLAIM, "metric": "test", "at": 1}]), "window-accuracy, stability"),
    "epoch beyond the end": (own(claims=[{**CLAIM, "at": 3}]), "a claim is about epoch 3 of 2"),
    "no threshold": (own(claims=[{**CLAIM, "metric": "epochs-to"}]), "needs a threshold"),
    "threshold in percent": (own(claims=[{**CLAIM, "metric": "epochs-to", "threshold": 95}]), "between 0 and 1"),
    "threshold of an accuracy": (own(claims=[{**CLAIM, "threshold": 0.5}]), "accuracy has no threshold"),
    "window beyond the end": (own(claims=[{**CLAIM, "metric": "stability", "at": 3}]), "needs 5 epochs"),
    "claim about one arm": (own(claims=[{**CLAIM, "than": CLAIM["better"]}]), "with itself"),
    "number in percent": (own(paper=[{"arm": "a", "metric": "accuracy", "value": 50.5}]), "write a share"),
    "no attack": (own(claims=[{**CLAIM, "metric": "robust"}]), "needs an attack"),
    "nothing measured": (own(claims=[{**CLAIM, "metric": "variance"}]), "measure: true"),
    "budget twice": (own(budgets=[5, 5]), "distinct numbers"),
    "no budget": (own(budgets=[0]), "at least 1"),
    "unknown metric": (own(claims=[{**CLAIM, "metric": "acuracy"}]), 'did you mean "accuracy"?'),
    "unknown number": (own(paper=[{"arm": "a", "metric": "beauty", "value": 1}]), 'no metric is called "beauty"'),
    "negative margin": (own(claims=[{**CLAIM, "margin": -0.1}]), "at least 0"),
    "number of no arm": (own(paper=[{"arm": "x", "metric": "accuracy", "value": 1}]), 'no arm is called "x"'),
    "unknown attack": (own(robust="pgd11"), 'no attack is called "pgd11"'),
    "measured along without measuring": (own(measure_every=2), "measure: true"),
    "named": (own(name="x"), "that of its file"),
    "a list": ("[1, 2]", "expected keys and values"),
    "no YAML": ("{a: [}", "not valid YAML"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_study_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    value, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        read_study(write(tmp_path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_study_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'no study is called "digist".*did you mean "digits"'):
        read_study("digist")
    with pytest.raises(UserError, match="cannot read the study"):
        read_study(str(tmp_path / "none.yaml"))


def test_the_name_of_an_arm_is_never_a_path(tmp_path: Path) -> None:
    arms = {"../../up": {}, "/etc": {}, "a\x00b": {}, "γ": {}}
    design = read_study(write(tmp_path, own(arms=arms)))
    names = {slug(arm) for arm in design.arms}
    assert len(names) == 4
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)


def test_study_files_have_no_duplicate_keys() -> None:
    """YAML takes the last of two equal keys without a word; an arm would be lost."""
    from importlib import resources

    for name in packaged_studies():
        text = (resources.files("equipoise.studies") / "designs" / f"{name}.yaml").read_text(encoding="utf-8")
        block = text.partition("\narms:\n")[2]
        lines = []
        for line in block.splitlines():
            if not line.startswith("  "):
                break
            lines.append(line)
        assert len(lines) == len(parse_yaml(text, name)["arms"]), name
