"""Recipes: strict keys, overrides, names, layers of files."""

from __future__ import annotations

import copy
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from equipoise.config import parameters_of
from equipoise.correction import Agent
from equipoise.data import Augment
from equipoise.errors import UserError
from equipoise.lr_schedule import Fast, Piecewise
from equipoise.models import MODELS
from equipoise.objectives import Standard
from equipoise.studies.design import read_study
from equipoise.topology import ALGORITHMS, SET, Dense, Dynamic, GraNet, RigL, SRigL
from equipoise.topology.initial import plan_layers
from equipoise.training.build_recipe import make_recipe
from equipoise.training.optimizers import AdamWOptions, SGDOptions
from equipoise.training.recipe import KEYS
from equipoise.training.recipe_files import apply_overrides, dump_recipe, lay_over, packaged_recipes, read_recipe

DIGITS = read_recipe("digits")
FAST = resources.files("equipoise") / "recipes" / "fast.yaml"


def override(*words: str, raw: dict[str, Any] | None = None) -> dict[str, Any]:
    return apply_overrides(DIGITS if raw is None else raw, words)


# What a recipe means


def test_an_empty_recipe_is_all_defaults() -> None:
    recipe = make_recipe({})
    assert (recipe.model, recipe.model_options, recipe.epochs, recipe.seed) == ("small", {}, 10, 0)
    assert (recipe.device, recipe.ema, recipe.bn_recalibration_batches, recipe.clip) == ("auto", 0.995, 32, 0.0)
    assert recipe.data.name == "digits"
    assert recipe.data.augment is None
    assert (recipe.checkpoint.every, recipe.checkpoint.steps, recipe.checkpoint.keep) == (1, 0, 2)
    assert recipe.topology == Dense()
    assert recipe.objective == Standard()
    assert not recipe.correction.corrects
    assert recipe.optimizer == SGDOptions(lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    assert recipe.schedule == Piecewise(milestones=(0.5, 0.75), factors=(0.1, 0.01))


def test_every_key_reaches_its_part() -> None:
    recipe = make_recipe(
        {
            "model": {"name": "mlp", "hidden": "32"},
            "data": {"name": "cifar10", "root": "elsewhere", "batch": 64, "augment": {"pad": 2}, "validation": 5000},
            "topology": {"name": "rigl", "sparsity": 0.5, "include": ["conv*"], "distribution": {"*": 0.5}},
            "correction": {"name": "agent", "gamma": 0.2, "mode": "replay"},
            "optimizer": {"name": "adamw", "lr": "1e-4", "decay_all": False},
            "schedule": {"name": "cosine", "warmup": 5},
            "objective": {"name": "at", "steps": 3},
            "epochs": 7,
            "seed": 11,
            "precision": "bf16",
            "device": "cpu",
            "ema": 0,
            "bn_recalibration_batches": 5,
            "full_pass": "adversarial",
            "clip": 1,
            "checkpoint": {"every": 3, "steps": 50, "keep": 4},
        }
        | {"correction": {"name": "agent", "gamma": 0.2, "mode": "running"}}
    )
    assert recipe.model_options == {"hidden": 32}
    assert recipe.data.augment == Augment(pad=2)
    assert (recipe.data.root, recipe.data.batch, recipe.data.validation) == ("elsewhere", 64, 5000)
    assert recipe.topology == RigL(sparsity=0.5, include=("conv*",), distribution={"*": 0.5}, seed=11)
    assert recipe.correction == Agent(gamma=0.2, mode="running")
    assert recipe.optimizer == AdamWOptions(lr=1e-4, decay_all=False)
    assert recipe.schedule.warmup == 5.0
    assert recipe.objective.attack_passes == 3
    assert (recipe.epochs, recipe.seed, recipe.precision, recipe.device) == (7, 11, "bf16", "cpu")
    assert (recipe.ema, recipe.bn_recalibration_batches, recipe.full_pass, recipe.clip) == (
        0.0,
        5,
        "adversarial",
        1.0,
    )
    assert (recipe.checkpoint.every, recipe.checkpoint.steps, recipe.checkpoint.keep) == (3, 50, 4)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"epocs": 3}, 'recipe: no option is called "epocs"; did you mean "epochs"?'),
        ({"epochs": 0}, "epochs=0: at least 1"),
        ({"epochs": "many"}, "epochs='many': expected a whole number"),
        ({"epochs": None}, "epochs=None: expected a whole number"),
        ({"seed": 1.5}, "seed=1.5: expected a whole number"),
        ({"ema": 1}, "ema=1.0"),
        ({"ema": -0.1}, "ema=-0.1"),
        ({"bn_recalibration_batches": 0}, "bn_recalibration_batches=0: at least 1 batch"),
        ({"clip": -1}, "clip=-1.0"),
        ({"precision": "fp16"}, "precision='fp16': expected one of "),
        ({"checkpoint": {"keep": 0}}, "checkpoint: every and keep are at least 1"),
        ({"checkpoint": 3}, "checkpoint: expected keys and values"),
        ({"model": "smal"}, 'no model is called "smal"; did you mean "small"?'),
        ({"model": {"name": "mlp", "hiden": 3}}, 'model: no option is called "hiden"; did you mean "hidden"?'),
        ({"model": {"name": "mlp", "hidden": "wide"}}, "model.hidden='wide': expected a whole number"),
        ({"model": {"hidden": 3}}, "model: expected a name"),
        ({"model": ["mlp"]}, "model: expected a name"),
        ({"data": "cifar"}, 'no dataset is called "cifar"'),
        ({"data": {"name": "digits", "batch": 0}}, "data: batch=0: at least one image"),
        ({"data": {"name": "digits", "augment": {"padd": 1}}}, 'data.augment: no option is called "padd"'),
        ({"topology": "rigel"}, 'no topology is called "rigel"; did you mean "rigl"?'),
        ({"topology": {"name": "set", "sparsity": 1.2}}, "topology: sparsity=1.2"),
        ({"topology": "dense-itop"}, 'topology: "dense" has no schedule of updates, so there is no "dense-itop"'),
        ({"topology": "rigl-itop-itop"}, 'no topology is called "rigl-itop"'),
        ({"topology": "dense-fast"}, 'topology: "dense" has no schedule of updates, so there is no "dense-fast"'),
        ({"topology": {"name": "rigl", "every": 2.5}}, "topology: every=2.5: a whole number of steps, or a fraction"),
        ({"objective": "att"}, 'no objective is called "att"'),
        ({"correction": {"name": "agent", "gamma": 2}}, "correction: gamma=2.0 must be between 0 and 1"),
        ({"correction": {"name": "agent", "mode": "guess"}}, "correction.mode='guess'"),
        ({"optimizer": {"name": "sgd", "lr": 0}}, "optimizer: lr=0.0: the learning rate is positive"),
        ({"optimizer": {"name": "sgd", "momentum": 1}}, "optimizer: momentum=1.0"),
        ({"optimizer": {"name": "adam", "beta2": -1}}, "optimizer: beta2=-1.0"),
        ({"optimizer": {"name": "adam", "momentum": 0.9}}, 'optimizer: no option is called "momentum"'),
        ({"schedule": {"name": "piecewise", "milestones": [0.5]}}, "1 milestones and 2 factors"),
        (
            {"objective": "at", "correction": {"name": "agent", "mode": "replay"}},
            "replay needs batches that are known ahead",
        ),
    ],
)
def test_a_wrong_recipe_is_one_line_that_helps(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        make_recipe(raw)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name, cls in ALGORITHMS.items() if issubclass(cls, Dynamic)])
def test_fast_names_take_the_budgets_schedule(name: str) -> None:
    cls = ALGORITHMS[name]
    assert issubclass(cls, Dynamic)
    made = make_recipe({"topology": {"name": f"{name}-fast", "sparsity": 0.5, "until": 0.9}}).topology
    assert made == cls.fast(sparsity=0.5, until=0.9)
    assert isinstance(made, Dynamic)
    assert (made.distribution, made.every, made.min_fan_in) == ("er", 0.02, 0 if made.pattern else 1)
    assert make_recipe(override(f"topology={name}-fast", "topology.every=9")).topology == cls.fast(
        sparsity=0.95, every=9
    )


@pytest.mark.parametrize("name", [name for name, cls in ALGORITHMS.items() if issubclass(cls, Dynamic)])
def test_itop_names_take_itops_schedule(name: str) -> None:
    cls = ALGORITHMS[name]
    assert issubclass(cls, Dynamic)
    made = make_recipe({"topology": {"name": f"{name}-itop", "sparsity": 0.5}, "seed": 3}).topology
    assert made == cls.itop(sparsity=0.5, seed=3)
    assert isinstance(made, Dynamic)
    assert made.until == 1.0
    assert make_recipe({"topology": {"name": f"{name}-itop", "every": 7}}).topology == cls.itop(every=7)


def test_itop_options_are_checked_against_itops_values() -> None:
    """Not against those of the plain algorithm: RigL's own window ends at 75 %."""
    made = make_recipe({"topology": {"name": "rigl-itop", "begin": 0.9}}).topology
    assert made == RigL.itop(begin=0.9)
    with pytest.raises(UserError, match="topology: no option is called"):
        make_recipe({"topology": {"name": "rigl-itop", "criterion": "signed"}})
    with pytest.raises(UserError, match="topology: every=0"):
        make_recipe({"topology": {"name": "rigl-itop", "every": 0}})


def test_the_seed_of_the_run_is_the_topologys_unless_it_has_its_own() -> None:
    assert make_recipe({"topology": "set", "seed": 5}).topology.seed == 5
    assert make_recipe({"topology": {"name": "set", "seed": 1}, "seed": 5}).topology.seed == 1


def test_making_a_recipe_changes_nothing_it_was_given() -> None:
    before = copy.deepcopy(DIGITS)
    recipe = make_recipe(DIGITS)
    apply_overrides(DIGITS, ["data.batch=7", "topology=set", "model.size=8", "checkpoint.keep=9"])
    assert before == DIGITS
    assert recipe.raw == DIGITS
    assert recipe.raw is not DIGITS


# Overrides


def test_overrides_set_plain_keys_and_options() -> None:
    raw = override("epochs=3", "data.batch=32", "optimizer.lr=5e-4", "checkpoint.steps=10", "data.augment.pad=2")
    recipe = make_recipe(raw)
    assert (recipe.epochs, recipe.data.batch, recipe.optimizer.lr, recipe.checkpoint.steps) == (3, 32, 5e-4, 10)
    assert recipe.data.augment == Augment(pad=2)
    assert recipe.ema == DIGITS["ema"]


def test_the_later_of_two_overrides_counts() -> None:
    assert override("epochs=3", "epochs=4")["epochs"] == 4


def test_a_part_under_a_new_name_keeps_the_options_it_knows() -> None:
    assert override("topology=set")["topology"] == {"name": "set", "sparsity": 0.95, "every": 20}
    assert override("topology=static")["topology"] == {"name": "static", "sparsity": 0.95}
    assert override("topology=set-itop")["topology"] == {"name": "set-itop", "sparsity": 0.95, "every": 20}
    kept = {"name": "adam", "lr": 0.05, "weight_decay": 5e-4}
    assert override("optimizer=adam")["optimizer"] == kept
    assert make_recipe(override("optimizer=adam")).optimizer.lr == 0.05
    assert override("model=mlp", raw={"model": {"name": "small", "size": 8}})["model"] == {"name": "mlp", "size": 8}


def test_another_dataset_keeps_batch_and_augmentation() -> None:
    raw = {"data": {"name": "digits", "batch": 64, "augment": {"pad": 1}}}
    assert override("data=cifar10", raw=raw)["data"] == {"name": "cifar10", "batch": 64, "augment": {"pad": 1}}


def test_a_part_given_by_its_name_alone_gets_options() -> None:
    assert override("topology.sparsity=0.5", raw={"topology": "set"})["topology"] == {"name": "set", "sparsity": 0.5}
    assert override("optimizer.lr=0.5", raw={})["optimizer"] == {"name": "sgd", "lr": 0.5}
    assert override("topology={name: set, every: 3}")["topology"] == {"name": "set", "every": 3}
    assert override("data.augment.flip=false", raw={"data": {"name": "digits", "augment": None}})["data"] == {
        "name": "digits",
        "augment": {"flip": False},
    }


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("epochs", "is not an override; write key=value"),
        ("=3", "is not an override"),
        ("", "is not an override"),
        ("epochs.more=3", '"epochs" has no options'),
        ("data.batch.more=3", '"batch" has no options'),
        ("topology=rigel", 'no topology is called "rigel"'),
        ("topology=[", "not valid YAML"),
        ("nothing.here=3", 'no option is called "nothing"'),
        ("topology.sparcity=0.5", 'no option is called "sparcity"; did you mean "sparsity"?'),
        ("topology..sparsity=0.5", 'no option is called ""'),
        ("epochs=", "epochs=None: expected a whole number"),
        ("model=", "model: expected a name"),
        (".".join("x" * 5000) + "=1", 'no option is called "x"'),
    ],
)
def test_a_wrong_override_is_one_line_that_helps(word: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        make_recipe(override(word))
    assert told in str(error.value)


# Names of earlier versions

OLD: list[tuple[str, str, Any]] = [
    ("average", "ema", 0.9),
    ("reestimate", "bn_recalibration_batches", 5),
    ("correction.way", "correction.mode", "replay"),
    ("correction.share", "correction.step_fraction", 0.5),
    ("correction.fraction", "correction.batch_fraction", 0.5),
    ("correction.value", "correction.coefficient: {name: fixed, value: ...}", 0.1),
]


@pytest.mark.parametrize(("old", "new", "value"), OLD)
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str, value: Any, tmp_path: Path) -> None:
    part, _, key = old.rpartition(".")
    raw = {part: {"name": "agent", key: value}} if part else {key: value}
    told = f'"{old}" is now called "{new}"'
    recipe = write(tmp_path / "old.yaml", raw)
    for name, arm in {"study.yaml": raw, "dotted.yaml": {old: value}}.items():
        write(tmp_path / name, {"title": "T", "recipe": "digits", "arms": {"A": arm}})
    attempts = {
        "recipe": lambda: make_recipe(raw),
        recipe: lambda: read_recipe(recipe),
        "study.yaml, A: recipe": lambda: read_study(str(tmp_path / "study.yaml")),
        "dotted.yaml, A: recipe": lambda: read_study(str(tmp_path / "dotted.yaml")),
    }
    for where, attempt in attempts.items():
        with pytest.raises(UserError) as error:
            attempt()
        assert str(error.value) == f"{where}: {told}"
    with pytest.raises(UserError) as error:
        make_recipe(override(f"{old}={value}"))
    assert str(error.value) == f"recipe: {told}"


def test_the_new_names_are_known() -> None:
    for _, new, _ in OLD:
        part, _, key = new.partition(":")[0].rpartition(".")
        assert key in (parameters_of(Agent) if part else KEYS)


# Files


def write(path: Path, raw: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(raw))
    return str(path)


OVERLAYS = [name for name, line in packaged_recipes().items() if line.startswith("overlay")]


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_is_sound(name: str) -> None:
    raw = read_recipe(name)
    recipe = make_recipe(raw)
    assert make_recipe(yaml.safe_load(dump_recipe(raw))) == recipe
    assert 10 < len(packaged_recipes()[name]) < 200


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_goes_over_a_recipe(overlay: str) -> None:
    base, over = read_recipe("bsr-vgg16-cifar10"), read_recipe(overlay)
    both = read_recipe("bsr-vgg16-cifar10", overlay)
    make_recipe(both)
    for key in base.keys() - over.keys():
        assert both[key] == base[key]
    for key, value in over.items():
        assert value.items() <= both[key].items()


def test_a_recipe_is_read_from_a_file_or_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", {"epochs": 3})
    assert read_recipe(path) == {"epochs": 3}
    assert read_recipe("digits")["model"] == "small"


def test_a_base_is_looked_for_beside_the_recipe_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", {"base": "digits", "epochs": 3})
    mine = write(tmp_path / "folder" / "mine.yaml", {"base": "../base.yaml", "topology": {"sparsity": 0.5}})
    raw = read_recipe(mine)
    assert raw["epochs"] == 3
    assert raw["topology"] == {**DIGITS["topology"], "sparsity": 0.5}
    assert "base" not in raw


def test_laying_one_recipe_over_another() -> None:
    base = {"model": "small", "topology": {"name": "set", "sparsity": 0.5}, "checkpoint": {"keep": 3}, "epochs": 2}
    same_name = lay_over(base, {"topology": {"name": "set", "every": 7}, "checkpoint": {"steps": 4}})
    assert same_name["topology"] == {"name": "set", "sparsity": 0.5, "every": 7}
    assert same_name["checkpoint"] == {"keep": 3, "steps": 4}
    assert lay_over(base, {"topology": {"name": "rigl"}})["topology"] == {"name": "rigl"}
    assert lay_over(base, {"topology": "rigl"})["topology"] == "rigl"
    assert lay_over(base, {"topology": {"every": 7}})["topology"] == {"name": "set", "sparsity": 0.5, "every": 7}
    assert lay_over(base, {"model": {"size": 8}})["model"] == {"name": "small", "size": 8}
    assert base["topology"] == {"name": "set", "sparsity": 0.5}


def test_a_part_under_a_new_name_keeps_the_options_that_it_lists() -> None:
    base = {"topology": {"name": "set", "sparsity": 0.5, "every": 7}, "checkpoint": {"steps": 4}}
    over = {"topology": {"name": "rigl", "keep": ["sparsity", "exclude"]}, "checkpoint": {"keep": 3}}
    assert lay_over(base, over) == {
        "topology": {"name": "rigl", "sparsity": 0.5},
        "checkpoint": {"steps": 4, "keep": 3},
    }
    assert lay_over({}, over)["topology"] == {"name": "rigl"}
    assert lay_over({"topology": "set"}, over)["topology"] == {"name": "rigl"}
    own = {"topology": {"name": "rigl", "sparsity": 0.8, "keep": ["sparsity"]}}
    assert lay_over(base, own)["topology"] == {"name": "rigl", "sparsity": 0.8}


def test_a_base_may_be_a_list(tmp_path: Path) -> None:
    write(tmp_path / "one.yaml", {"epochs": 3, "ema": 0.9})
    write(tmp_path / "two.yaml", {"epochs": 4, "clip": 1.0})
    mine = write(tmp_path / "mine.yaml", {"base": ["one.yaml", "two.yaml", "agent"], "clip": 2.0})
    assert read_recipe(mine) == {"epochs": 4, "ema": 0.9, "clip": 2.0, "correction": {"name": "agent"}}


# The fast recipes

BASES = [name for name, line in packaged_recipes().items() if not line.startswith("overlay")]


@pytest.mark.parametrize("base", BASES)
def test_fast_goes_over_every_recipe_and_keeps_its_sparsity(base: str) -> None:
    raw = apply_overrides(read_recipe(base), ["topology.exclude=['*.bias']", "topology.seed=4"])
    before, after = make_recipe(raw), make_recipe(lay_over(raw, yaml.safe_load(FAST.read_text())))
    assert after.topology == GraNet(
        sparsity=before.topology.sparsity,
        distribution="er",
        exclude=("*.bias",),
        seed=4,
        initial_sparsity="auto",
        every=0.02,
        pattern=before.topology.pattern,
        min_fan_in=0 if before.topology.pattern else 1,
        dense_first=before.topology.dense_first,
        dense_last=before.topology.dense_last,
    )
    assert after.schedule == Fast()
    assert (after.epochs, after.optimizer, after.data) == (before.epochs, before.optimizer, before.data)


@pytest.mark.parametrize("name", ["vgg_c-fast", "resnet18-fast", "wrn-fast", "digits-fast"])
@pytest.mark.parametrize(
    ("sparsity", "start"), [(0.5, 0.0), (0.9, 0.0), (0.95, 0.5), (0.98, 0.8), (0.99, 0.9), (0.999, 0.99)]
)
def test_fast_starts_with_ten_times_the_weights(name: str, sparsity: float, start: float) -> None:
    recipe = make_recipe(apply_overrides(read_recipe(name), [f"topology.sparsity={sparsity}"]))
    assert isinstance(recipe.topology, GraNet)
    assert recipe.topology.start == pytest.approx(start)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("resnet18-2to4", "conv1.weight"),
        ("vgg_c-block", "classifier.6.weight"),
        ("vgg_c-srigl", "classifier.6.weight"),
    ],
)
def test_structured_recipes_fit_their_models(name: str, dense: str) -> None:
    recipe = make_recipe(read_recipe(name))
    model = MODELS[recipe.model](classes=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no weight stays dense because it does not divide
        plan = plan_layers(recipe.topology, model)
    chosen = [n for n, p in model.named_parameters() if p.dim() > 1 and n.removeprefix("normalize.") == n]
    assert {layer.name for layer in plan} == set(chosen) - {dense}
    density = sum(layer.final for layer in plan) / sum(layer.weight.numel() for layer in plan)
    assert density == pytest.approx(1 - recipe.topology.sparsity, rel=0.01)
    assert recipe.topology.pattern == {"resnet18-2to4": "2:4", "vgg_c-block": "16x1"}.get(name, "fan_in")
    assert isinstance(recipe.topology, SRigL if name == "vgg_c-srigl" else GraNet)
    assert make_recipe(read_recipe(name, "agent")).topology == recipe.topology


def test_the_budget_of_a_fast_recipe_sets_its_schedules() -> None:
    for epochs in (6, 12, 24):
        recipe = make_recipe(override(f"epochs={epochs}", raw=read_recipe("vgg_c-set-itop", "fast")))
        window = recipe.topology.window(epochs * 391)
        assert window is not None
        assert window.every == round(epochs * 391 / 50)
        assert sum(window.contains(step) for step in range(epochs * 391)) in (36, 37, 38)
        factors = [recipe.schedule.factor(step, epochs, 391) for step in range(epochs * 391)]
        assert factors.index(max(factors)) in range(epochs * 391 // 6 - 1, epochs * 391 // 6 + 2)


def test_files_that_cannot_be_recipes(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "numbers.yaml").write_text("1: 2")
    (tmp_path / "folder.yaml").mkdir()
    write(tmp_path / "own.yaml", {"base": "own.yaml"})
    write(tmp_path / "there.yaml", {"base": "back.yaml"})
    write(tmp_path / "back.yaml", {"base": "./there.yaml"})
    write(tmp_path / "list_base.yaml", {"base": [1]})
    for name in ("bytes", "list", "empty", "numbers", "folder", "own", "there", "list_base", "missing"):
        with pytest.raises(UserError) as error:
            read_recipe(str(tmp_path / f"{name}.yaml"))
        assert {"there": "back"}.get(name, name) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["digitz", "", "x" * 5000, "a/b", "\0", "\0.yaml", "..", "."])
def test_names_that_are_no_recipe(name: str) -> None:
    with pytest.raises(UserError):
        read_recipe(name)


def test_a_missing_recipe_is_told_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match='no recipe is called "digit" and there is no such file; did you mean'):
        read_recipe("digit")


def test_a_recipe_survives_its_file() -> None:
    raw = override("topology=set", "optimizer.lr=5e-4", "data.root='2020'", "device='cuda:1'", "seed=07")
    again = yaml.safe_load(dump_recipe(raw))
    assert again == raw
    assert isinstance(make_recipe(again).topology, SET)


@pytest.mark.parametrize("name", ["resnet18-2to4", "vgg_c-block", "vgg_c-srigl"])
def test_a_dense_baseline_has_no_pattern(name: str) -> None:
    recipe = make_recipe(apply_overrides(read_recipe(name), ["topology=dense"]))
    assert (recipe.topology.sparsity, recipe.topology.pattern) == (0, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["topology.pattern=2:4"], 'sparsity=0.95: pattern="2:4" has sparsity=0.5; set sparsity=0.5 too'),
        (["topology=sr-ste"], 'sparsity=0.95: pattern="2:4" has sparsity=0.5; set sparsity=0.5 too'),
        (["topology=hydra", "topology.pattern=2:4"], 'pattern="2:4": HYDRA keeps single weights; use sr-ste'),
    ],
)
def test_patterns_without_their_sparsity(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        make_recipe(apply_overrides(read_recipe("digits"), words))
    assert str(error.value) == f"topology: {told}"
    make_recipe(apply_overrides(read_recipe("digits"), ["topology=sr-ste", "topology.sparsity=0.5"]))
