"""Reading results: a file that cannot be used is reported in one line, and the rest is read."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.errors import UserError
from equipoise.report import make_page
from equipoise.studies.metrics import MEASURED, METRICS
from equipoise.studies.reading import read_results
from equipoise.studies.results import Question, result_file, write_result
from equipoise.training.run_folder import RunFolder
from study_helpers import CLAIM, line, result_json, write_study


def test_implausible_results_are_left_out(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", ["SGD"])
    sound = result_json("SGD", 0)
    wrong: dict[int, dict[str, Any]] = {
        2: {"recipe": {**sound["recipe"], "epochs": 9, "seed": 2}},
        3: {"recipe": {**sound["recipe"], "model": "mlp", "seed": 3}},
        4: {"epochs": [{**e, "scores": {"plain": {"accuracy": 100 * 0.1}}} for e in sound["epochs"]]},
    }
    for seed, change in wrong.items():
        write_result(result_file(folder, "SGD", seed), {**sound, "seed": seed, **change})
    reading = read_results(folder)
    assert [result.seed for result in reading.studies[0].results["SGD"]] == [0, 1]
    for text in (
        "seed2.json: left out: its last epoch is 6 of 9",
        "seed3.json: left out: its recipe differs from that of seed 0: model",
        "seed4.json: left out: it has no finished epoch",
    ):
        assert any(text in line for line in reading.problems), text
    other = [{**e, "split": "validation"} for e in sound["epochs"]]
    write_result(result_file(folder, "SGD", 1), {**sound, "seed": 1, "epochs": other})
    assert any(
        "the accuracies are of test and of validation images" in line for line in read_results(folder).problems
    )
    (folder / "study.json").write_text('{"version": 3}')
    assert [result.seed for result in read_results(folder).studies[0].results["SGD"]] == [0, 1]


def test_seeds_may_differ_in_storage_and_in_modes_of_the_same_estimate(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", ["AGENT"])
    changes: list[dict[str, Any]] = [
        {"correction": "agent"},
        {"correction": {"name": "agent", "mode": "replay"}, "storage": "packed"},
        {"correction": {"name": "agent", "mode": "recompute"}},
        {"correction": {"name": "agent", "mode": "running"}},
    ]
    for seed, change in enumerate(changes):
        value = result_json("AGENT", seed)
        write_result(result_file(folder, "AGENT", seed), {**value, "recipe": {**value["recipe"], **change}})
    reading = read_results(folder)
    assert [result.seed for result in reading.studies[0].results["AGENT"]] == [0, 1, 2]
    (problem,) = reading.problems
    assert problem.endswith("agent-seed3.json: left out: its recipe differs from that of seed 0: correction")


def test_a_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_study(tmp_path / "results" / "s")
    reading = read_results(tmp_path / "results")
    assert reading.problems == ()
    (study,) = reading.studies
    assert (study.name, study.title, study.about) == ("s", "A study", "About.")
    assert {arm: [r.seed for r in results] for arm, results in study.results.items()} == {
        "SGD": [0, 1],
        "AGENT": [0, 1],
    }
    agent = study.results["AGENT"][1]
    assert [e.scores["plain"] for e in agent.epochs] == pytest.approx([0.1 * i + 0.021 for i in range(1, 7)])
    assert agent.epochs[2].passes == {"forward": 30, "backward": 30}
    assert agent.epochs[2].correction == {"c": 0.5, "weight": 0.05}
    assert agent.layers == {"fc": (100, 5), "head": (10, 10)}
    assert agent.robust["plain"]["robust"] == 0.3
    assert agent.test == {"plain": 0.6}
    assert agent.measured["variance"] == 2.0
    found = {name: METRICS[name](agent, Question(metric=name)) for name in MEASURED}
    assert found == {
        "variance": 2.0,
        "correlation": 0.7,
        "variance-everywhere": 5.0,
        "correlation-everywhere": 0.2,
        "variance-perturbed": None,
        "relative-variance": None,
    }
    assert [e.measured.get("correlation") for e in agent.epochs] == [None, 0.9, None, None, None, None]
    assert (study.claims[0].better, study.claims[0].at, study.claims[0].score) == ("AGENT", 3, "plain")
    assert study.paper[0].value == 0.35
    assert read_results(tmp_path / "results" / "s") == reading


WRONG = {
    "half": (lambda value: json.dumps(value)[:200], "it is damaged (not JSON)"),
    "empty": (lambda value: "", "it is damaged (not JSON)"),
    "list": (lambda value: "[1]", "it is damaged (not a JSON object)"),
    "nan": (lambda value: '{"version": 2, "seed": NaN}', "it is damaged (not JSON)"),
    "deep": (lambda value: "[" * 100_000, "it is damaged (not JSON)"),
    "version": (
        lambda value: json.dumps(value | {"version": 3}),
        "it is of version 3; this equipoise reads version 2",
    ),
    "unfinished": (lambda value: json.dumps(value | {"finished": False}), "it is not finished"),
    "seed": (lambda value: json.dumps(value | {"seed": "zero"}), "seed='zero': expected a whole number"),
    "study": (lambda value: json.dumps(value | {"study": "t"}), "it is of another study, t"),
    "epochs": (lambda value: json.dumps(value | {"epochs": None}), "it has no finished epoch"),
    "none": (lambda value: json.dumps(value | {"epochs": []}), "it has no finished epoch"),
    "twice": (lambda value: json.dumps(value | {"seed": 0}), "another file holds seed 0 of SGD"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_unusable_file_is_reported_and_the_rest_is_read(tmp_path: Path, kind: str) -> None:
    folder = write_study(tmp_path / "s")
    make, why = WRONG[kind]
    (folder / "zzz.json").write_text(make(result_json(seed=7)))
    reading = read_results(folder)
    (problem,) = reading.problems
    assert "zzz.json: left out: " in problem
    assert why in problem
    assert {arm: len(results) for arm, results in reading.studies[0].results.items()} == {"SGD": 2, "AGENT": 2}


def test_binary_files_and_missing_arms_are_reported(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", arms=["SGD", "AGENT"])
    asked = json.loads((folder / "study.json").read_text())
    write_result(folder / "study.json", asked | {"arms": {"SGD": {}, "AGENT": {}, "SAGA": {}}})
    (folder / "zzz.json").write_bytes(b"\xff\xfe\x00")
    assert [p.replace(str(folder), "s") for p in read_results(folder).problems] == [
        "s/zzz.json: left out: it is damaged (not JSON); remove it and run the study again",
        "s: no finished seed of SAGA",
    ]


def test_only_epochs_with_wrong_types_are_left_out(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s")
    value = result_json(seed=5)
    value["epochs"][1]["epoch"] = "two"
    value["epochs"][3] = None
    value["epochs"][4]["scores"]["plain"]["accuracy"] = "high"
    write_result(folder / "sgd-seed5.json", value)
    reading = read_results(folder)
    (problem,) = reading.problems
    assert problem.endswith("sgd-seed5.json: 2 of 6 epochs left out, not as a run writes them: 2, 4")
    epochs = reading.studies[0].results["SGD"][-1].epochs
    assert [e.epoch for e in epochs] == [1, 3, 5, 6]
    assert "plain" not in epochs[2].scores


def test_wrong_claims_are_reported_and_results_without_study_json_are_shown(tmp_path: Path) -> None:
    claims = [{"better": "AGENT"}, "AGENT", {**CLAIM, "at": "end"}]
    folder = write_study(tmp_path / "s", claims=claims, paper={"a": 1})
    reading = read_results(folder)
    ends = [problem.rpartition("study.json: ")[2] for problem in reading.problems]
    assert ends == [
        "left out: claims[0]: says is missing",
        "left out: claims[1]: expected keys and values, got 'AGENT'",
        "left out: claims[2].at='end': expected a whole number",
        "left out: paper: expected a list, got {'a': 1}",
    ]
    (folder / "study.json").unlink()
    reading = read_results(folder)
    assert "has no study.json" in reading.problems[0]
    assert set(reading.studies[0].results) == {"SGD", "AGENT"}


def test_a_run_is_a_study_of_one_arm(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"epochs": 3, "seed": 4})
    for i in (1, 2):
        folder.append(line(i, 0.2 * i))
    with open(folder.metrics_file, "a") as file:
        file.write('{"epoch": 3, "sco')
    reading = read_results(tmp_path / "run")
    assert [problem.replace(str(tmp_path), "") for problem in reading.problems] == [
        "/run: the run is not finished; its epochs so far are shown",
        "/run/metrics.jsonl: 1 of 3 epochs left out, not as a run writes them: 3",
    ]
    ((found,),) = reading.studies[0].results.values()
    assert (found.arm, found.seed, found.finished) == ("run", 4, False)
    assert [e.scores["ema"] for e in found.epochs] == [0.2, 0.4]
    folder.finish({"version": 1, "test": {"plain": {"accuracy": 0.4}}})
    ((found,),) = read_results(tmp_path / "run").studies[0].results.values()
    assert found.finished
    assert found.test == {"plain": 0.4}


@pytest.mark.parametrize(
    ("environment", "startup_seconds", "kept"),
    [
        ({"device": "cpu"}, None, True),
        ({"device": "cpu", "jobs_on_device": 1}, None, True),
        ({"device": "cpu", "jobs_on_device": 2}, 0.0, False),
        ({"device": "cpu", "jobs_on_device": "many"}, None, True),
        ({"device": "NVIDIA X"}, None, False),  # an old run, whose seconds include its start-up
        ({"device": "NVIDIA X"}, 9.0, True),
        ({"device": "NVIDIA X", "jobs_on_device": 2}, 9.0, False),
    ],
)
def test_seconds_that_cannot_be_compared_are_left_out(
    tmp_path: Path, environment: dict[str, object], startup_seconds: float | None, kept: bool
) -> None:
    value = {**result_json(), "environment": environment}
    for entry in value["epochs"]:
        entry |= {} if startup_seconds is None else {"startup_seconds": startup_seconds}
    write_study(tmp_path / "s", arms=["SGD"])
    write_result(result_file(tmp_path / "s", "SGD", 0), value)
    (study,) = read_results(tmp_path).studies
    changed, other = study.results["SGD"]
    assert other.epochs[-1].seconds == 12.0
    assert changed.epochs[-1].seconds == (12.0 if kept else None)
    assert changed.epochs[-1].passes == other.epochs[-1].passes


def test_a_run_without_an_epoch_and_an_empty_folder_are_reported(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {"epochs": 3})
    assert read_results(tmp_path).studies == ()
    assert "no metrics.jsonl yet" in read_results(tmp_path).problems[-1]
    (tmp_path / "empty").mkdir()
    assert "holds no results" in read_results(tmp_path / "empty").problems[0]
    with pytest.raises(UserError, match="is not a folder"):
        read_results(tmp_path / "elsewhere")


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path, *(p for key, item in items for p in places(item, (*path, key)))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([-1, 0, 1e300, 2**80]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.slow
def test_the_page_is_made_whatever_a_file_holds(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "s"
    if not folder.exists():
        write_study(folder)
    name = data.draw(st.sampled_from(["study.json", "agent-seed1.json"]))
    sound = (folder / name).read_text()
    value = {"root": json.loads(sound)}
    *path, last = data.draw(st.sampled_from([p for p in places(value) if p]))
    part = broken = copy.deepcopy(value)
    for key in path:
        part = part[key]  # type: ignore[index]
    part[last] = data.draw(JSON)  # type: ignore[index]
    try:
        (folder / name).write_text(json.dumps(broken["root"]))
        reading = read_results(folder)
        assert len(reading.studies) == 1
        assert "\n" not in "".join(reading.problems)
        make_page(reading, "s").encode("utf-8", "replace")
    finally:
        (folder / name).write_text(sound)
