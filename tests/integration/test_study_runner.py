"""Running studies: only missing jobs are run, and kills and failures lose nothing."""

from __future__ import annotations

import gc
import json
import re
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.common import open_run
from equipoise.studies import runner
from equipoise.studies.design import read_study
from equipoise.studies.launch import here, processes
from equipoise.studies.reading import read_results
from equipoise.studies.record import record
from equipoise.studies.runner import Job, jobs_of, run_job, run_study, state
from equipoise.training import signals
from equipoise.training.measure import measure_trainer
from equipoise.training.run_folder import RunFolder
from killing import launch
from study_run_helpers import ARMS, results_of, run, write_study
from train_helpers import held_by_another_process


def test_every_arm_and_seed_has_a_result_like_its_run(tmp_path: Path) -> None:
    sound, lines = run(write_study(tmp_path), tmp_path)
    assert sound
    assert len(lines) == 4
    assert all(line.startswith("little, ") and " s" in line and "%" in line for line in lines)
    asked = json.loads((tmp_path / "results/little/study.json").read_text())
    assert (asked["version"], asked["name"], asked["arms"]) == (2, "little", ARMS)
    paths = sorted((tmp_path / "results/little").glob("*-seed*.json"))
    assert len(paths) == 4
    for path in paths:
        value = json.loads(path.read_text())
        folder = RunFolder.open(tmp_path / "runs/little" / path.stem)
        assert (value["version"], value["study"], value["finished"]) == (2, "little", True)
        assert (value["arm"], value["seed"]) in {(arm, seed) for arm in ARMS for seed in (0, 1)}
        assert value["recipe"]["seed"] == value["seed"]
        assert value["recipe"].get("correction") == ARMS[value["arm"]].get("correction")
        assert [line["epoch"] for line in value["epochs"]] == [1, 2]
        for line, written in zip(folder.metrics(), value["epochs"], strict=True):
            assert written["train_loss"] == pytest.approx(line["train_loss"], rel=1e-5)
            assert written["scores"]["plain"]["accuracy"] == pytest.approx(
                line["scores"]["plain"]["accuracy"], rel=1e-5
            )
        size = sum(layer["size"] for layer in value["layers"].values())
        active = sum(layer["active"] for layer in value["layers"].values())
        assert active / size == pytest.approx(value["epochs"][-1]["density"], rel=1e-5)
        assert set(value["environment"]) == {
            "device",
            "torch",
            "python",
            "equipoise",
            "jobs_on_device",
            "commit",
            "date",
        }
        assert value["environment"]["jobs_on_device"] == 1
        assert "robust" not in value
        assert "measured" not in value


def test_the_command_prints_verdicts_and_the_next_command(tmp_path: Path) -> None:
    claims = [{"says": "AGENT loses nothing", "better": "A + B", "than": "SGD", "margin": 1.0}]
    source = write_study(tmp_path, claims=claims)
    words = ["study", source, "--results", f"{tmp_path}/r", "--work", f"{tmp_path}/w"]
    assert launch([*words, "--only", "SGD"], tmp_path / "log") == 0
    assert "not tested: AGENT loses nothing (A + B has no finished seed)\n" in (tmp_path / "log").read_text()
    assert launch(words, tmp_path / "log") == 0
    *_, verdict, following = (tmp_path / "log").read_text().splitlines()
    assert verdict.startswith("inconclusive: AGENT loses nothing (A + B ")  # two runs are too few
    assert following == f"next: equipoise report {tmp_path}/r/little -o report.html"
    assert launch([*words, "--list"], tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().splitlines()[-1] == "0 of 4 to run"


def test_a_finished_arm_is_never_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_study(tmp_path)
    run(source, tmp_path, only=["SGD"])
    before = {path: path.read_bytes() for path in (tmp_path / "results/little").glob("sgd-*.json")}
    assert len(before) == 2
    started: list[str] = []
    original = runner.run_job

    def counted(job: Job, on_device: int) -> str:
        started.append(job.arm)
        return original(job, on_device)

    monkeypatch.setattr(runner, "run_job", counted)
    sound, lines = run(source, tmp_path)
    assert sound
    assert started == ["A + B", "A + B"]
    assert lines[0] == "little: 2 of 4 to run"
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("moment", [("after a step", 16), ("after a line", 5), ("before the result", 2)])
def test_a_killed_study_resumes_and_ends_like_an_undisturbed_one(tmp_path: Path, moment: tuple[str, int]) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    source = write_study(tmp_path)
    run(source, tmp_path / "whole")
    folder = tmp_path / "killed"
    words = ["study", source, "--results", str(folder / "results"), "--work", str(folder / "runs")]
    assert launch(words, tmp_path / "log", moment) == -9
    finished = {path: path.read_bytes() for path in (folder / "results/little").glob("*-seed*.json")}
    assert 0 < len(finished) < 4
    assert launch(words, tmp_path / "log") == 0
    assert {path: path.read_bytes() for path in finished} == finished
    assert results_of(folder) == results_of(tmp_path / "whole")


def test_a_job_killed_right_at_its_start_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs/little/sgd-seed0"
    folder.mkdir(parents=True)
    (folder / ".recipe.yaml.tmp").write_text("mod")
    assert run(write_study(tmp_path), tmp_path, only=["SGD"], seeds=[0])[0]


def test_a_failing_arm_is_one_line_and_the_others_run(tmp_path: Path) -> None:
    arms = {"homeless": {"data": {"name": "cifar10", "root": f"{tmp_path}/nowhere"}}, **ARMS}
    words = ["study", write_study(tmp_path, arms, seeds=[0]), "--results", f"{tmp_path}/r", "--work", f"{tmp_path}/w"]
    assert launch(words, tmp_path / "log") == 1
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("little, ")]
    assert len(lines) == 3
    assert "homeless" in lines[0]
    assert "nowhere" in lines[0]
    assert len(list((tmp_path / "r/little").glob("*-seed0.json"))) == 2


def test_an_unexpected_error_leaves_its_traceback_next_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(runner, "record", broken)
    sound, lines = run(write_study(tmp_path, seeds=[0]), tmp_path, only=["SGD"])
    assert not sound
    file = tmp_path / "runs/little/sgd-seed0.error.txt"
    assert lines == [f"little, SGD, seed 0: RuntimeError: two lines ({file})"]
    assert "in broken" in file.read_text()


def test_a_result_of_another_recipe_is_neither_used_nor_overwritten(tmp_path: Path) -> None:
    run(write_study(tmp_path), tmp_path, only=["SGD"], seeds=[0])
    before = (tmp_path / "results/little/sgd-seed0.json").read_bytes()
    changed = write_study(tmp_path, set={"epochs": 3})
    sound, lines = run(changed, tmp_path, only=["SGD"], seeds=[0])
    assert not sound
    assert "is of another recipe" in lines[0]
    assert (tmp_path / "results/little/sgd-seed0.json").read_bytes() == before
    (tmp_path / "results/little/sgd-seed0.json").unlink()
    sound, lines = run(changed, tmp_path, only=["SGD"], seeds=[0])
    assert not sound
    assert "is a run of another recipe" in lines[0]


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    source = write_study(tmp_path)
    (tmp_path / "results/little").mkdir(parents=True)
    (tmp_path / "results/little/sgd-seed0.json").write_text('{"arm": ')
    sound, lines = run(source, tmp_path, seeds=[0])
    assert not sound
    assert "it is damaged" in lines[0]
    assert any(line.startswith("little, A + B, seed 0: plain") for line in lines)


def test_the_folder_of_the_data_is_not_in_a_result(tmp_path: Path) -> None:
    source = write_study(tmp_path, seeds=[0])
    run(source, tmp_path, data=tmp_path / "secret place")
    for path in (tmp_path / "results/little").glob("*.json"):
        assert "secret" not in path.read_text()
    sound, lines = run(source, tmp_path, data=tmp_path / "elsewhere")
    assert (sound, lines) == (True, ["little: 0 of 2 to run"])


def test_a_result_with_a_chosen_mode_matches_a_recipe_without_one(tmp_path: Path) -> None:
    source = write_study(tmp_path, {"AGENT": {"correction": "agent"}}, seeds=[0])
    assert run(source, tmp_path)[0]
    value = json.loads((tmp_path / "results/little/agent-seed0.json").read_text())
    assert value["recipe"]["correction"] == {"name": "agent", "mode": "replay"}
    assert run(source, tmp_path) == (True, ["little: 0 of 1 to run"])


def test_a_job_that_another_process_runs_is_left_to_it(tmp_path: Path) -> None:
    source = write_study(tmp_path, seeds=[0])
    run(source, tmp_path, only=["SGD"])
    (tmp_path / "results/little/sgd-seed0.json").unlink()
    with held_by_another_process(tmp_path / "runs/little/sgd-seed0"):
        sound, lines = run(source, tmp_path)
    assert not sound
    assert "is being trained by another process" in lines[0]
    assert run(source, tmp_path)[0]


@pytest.mark.parametrize("part", [{"robust": "pgd10", "attacked": 200}, {"measure": True}], ids=["attack", "measure"])
def test_a_signal_stops_the_attack_on_the_final_weights(
    tmp_path: Path, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not after the attack, which may take an hour. The trained weights are on the disk."""
    source = write_study(tmp_path, {"SGD": {}}, **part, seeds=[0])
    # the first signal comes as the judging begins
    monkeypatch.setattr(runner, "record", lambda *a: signal.raise_signal(signal.SIGTERM) or record(*a))
    with pytest.raises(SystemExit) as stopped, signals.stoppable("equipoise study"):
        run(source, tmp_path)
    monkeypatch.undo()
    assert stopped.value.code == 143
    assert not list((tmp_path / "results/little").glob("*-seed*"))
    assert run(source, tmp_path)[0]
    assert len(results_of(tmp_path)) == 1


def test_robust_and_measured_are_those_of_the_final_weights(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"robust": "pgd10", "measure": True, "measure_every": 1, "seeds": [0]}
    source = write_study(tmp_path, {"SGD": {}}, **changes)
    assert run(source, tmp_path)[0]
    value = json.loads((tmp_path / "results/little/sgd-seed0.json").read_text())
    for name, score in value["robust"].items():
        assert score["clean"] == pytest.approx(value["result"]["test"][name]["accuracy"], abs=1e-6)
        assert 0 <= score["robust"] <= score["clean"]
        assert score["images"] == value["result"]["test"][name]["images"]
    along = value["measured"].pop("along")
    assert [line["epoch"] for line in along] == [1, 2]
    again = measure_trainer(open_run(tmp_path / "runs/little/sgd-seed0"))
    for key in ("variance", "correlation", "c_star", "norm"):
        assert value["measured"][key] == pytest.approx(again[key], rel=1e-5)
    (tmp_path / "results/little/sgd-seed0.json").unlink()
    run(write_study(tmp_path, {"SGD": {}}, **{**changes, "attacked": 30}), tmp_path)
    few = json.loads((tmp_path / "results/little/sgd-seed0.json").read_text())["robust"]
    assert few["plain"]["images"] == 30


@pytest.mark.parametrize("change", [{"attacked": 50}, {"robust": "fgsm"}, {"measure": True}])
def test_results_with_another_attack_are_not_mixed(tmp_path: Path, change: dict[str, Any]) -> None:
    asked = {"robust": "pgd10", "attacked": 30, "seeds": [0]}
    run(write_study(tmp_path, {"SGD": {}}, **asked), tmp_path)
    assert run(write_study(tmp_path, {"SGD": {}}, **asked), tmp_path) == (True, ["little: 0 of 1 to run"])
    sound, lines = run(write_study(tmp_path, {"SGD": {}}, **asked | change), tmp_path)
    assert not sound
    assert "was attacked or measured differently; remove it" in lines[0]
    (tmp_path / "results/little/sgd-seed0.json").unlink()  # only the attack is repeated
    assert run(write_study(tmp_path, {"SGD": {}}, **asked | change), tmp_path)[0]


def test_a_job_frees_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    original = runner.record

    def watched(study: str, arm: str, trainer: Any, *rest: Any) -> Any:
        held.append(weakref.ref(trainer.parts.model))
        held.append(weakref.ref(trainer.parts.correction))
        if arm == "bad":
            raise RuntimeError("after all the work")
        return original(study, arm, trainer, *rest)

    monkeypatch.setattr(runner, "record", watched)
    gc.disable()  # so that the job itself has to collect
    try:
        run(write_study(tmp_path, {**ARMS, "bad": {}}, seeds=[0]), tmp_path)
    finally:
        gc.enable()
    assert len(held) == 6
    assert not any(ref() for ref in held)


def test_states(tmp_path: Path) -> None:
    source = write_study(tmp_path, seeds=[0])
    words = ["study", source, "--results", f"{tmp_path}/results", "--work", f"{tmp_path}/runs"]
    assert launch(words, tmp_path / "log", ("after a line", 3)) == -9
    jobs = jobs_of(read_study(source), tmp_path / "results", tmp_path / "runs")
    assert [state(job) for job in jobs] == ["finished", "interrupted after 1 epochs"]
    elsewhere = jobs_of(read_study(source), tmp_path / "none", tmp_path / "none")
    assert [state(job) for job in elsewhere] == ["missing", "missing"]
    log = tmp_path / "list"
    assert launch([*words, "--list"], log) == 0
    assert log.read_text().splitlines()[1] == "little, A + B, seed 0: interrupted after 1 epochs, about 1 s"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "SDG"], 'no arm is called "SDG"; did you mean "SGD"?'),
        (["--seeds", "0,x"], '"x" is not a seed'),
        (["--seeds", "7"], "has no seed 7; choose from 0, 1"),
        (["--jobs", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    places = ["--results", f"{tmp_path}/results", "--work", f"{tmp_path}/runs"]
    assert launch(["study", write_study(tmp_path), *places, *words], tmp_path / "log") == 2
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "results").exists()


def test_a_result_records_other_jobs_on_the_device(tmp_path: Path) -> None:
    design = read_study(write_study(tmp_path))
    jobs = jobs_of(design, tmp_path / "results", tmp_path / "runs", seeds=[0], other_jobs=1)
    assert run_study(design, jobs, tmp_path / "results", here, lambda line: None)
    assert {value["environment"]["jobs_on_device"] for value in results_of(tmp_path).values()} == {2}


def test_divergence_is_a_result_that_is_kept_and_shown(tmp_path: Path) -> None:
    source = write_study(tmp_path, {"SGD": {}, "wild": {"optimizer": {"lr": 1e30}}}, seeds=[0])
    sound, lines = run(source, tmp_path)
    assert sound
    assert re.fullmatch(r"little, wild, seed 0: diverged: the (loss|gradient) .* of epoch 1.*", lines[1])
    assert run(source, tmp_path) == (True, ["little: 0 of 2 to run"])
    design = read_study(source)
    states = [state(job) for job in jobs_of(design, tmp_path / "results", tmp_path / "runs")]
    assert states[0] == "finished"
    assert states[1] == lines[1].partition("seed 0: ")[2]
    (found,) = read_results(tmp_path / "results").studies
    assert read_results(tmp_path / "results").problems == ()
    assert found.results["wild"] == ()
    assert f"diverged: {found.diverged['wild'][0].diverged}" == states[1]
    assert set(found.diverged) == {"wild"}
    value = json.loads((tmp_path / "results/little/wild-seed0.json").read_text())
    assert (value["finished"], value["epochs"], value["result"]) == (True, [], {})


@pytest.mark.filterwarnings("ignore:the network learned nothing")
def test_a_run_that_learned_nothing_is_reported(tmp_path: Path) -> None:
    arms = {"SGD": {"optimizer": {"lr": 0.5}}, "idle": {"optimizer": {"lr": 1e-12}}}
    _, lines = run(write_study(tmp_path, arms, seeds=[0], set={"epochs": 5}), tmp_path)
    assert [line.endswith(" s, learned nothing") for line in lines] == [False, True]
    (found,) = read_results(tmp_path / "results").studies
    assert [result.arm for result in found.stuck] == ["idle"]


def test_a_run_that_diverges_late_keeps_its_epochs(tmp_path: Path) -> None:
    wild = {"optimizer": {"lr": 1e-30}, "schedule": {"name": "piecewise", "milestones": [0.5], "factors": [1e60]}}
    run(write_study(tmp_path, {"wild": wild}, seeds=[0]), tmp_path)
    (found,) = read_results(tmp_path / "results").studies
    assert [epoch.epoch for epoch in found.diverged["wild"][0].epochs] == [1]


@pytest.mark.slow
def test_processes_and_here_give_the_same_results(tmp_path: Path) -> None:
    source = write_study(tmp_path)
    design = read_study(source)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    run(source, tmp_path / "here")
    jobs = jobs_of(design, tmp_path / "there/results", tmp_path / "there/runs")
    assert run_study(design, jobs, tmp_path / "there/results", processes(2), lambda line: None)
    here_found, there_found = results_of(tmp_path / "here"), results_of(tmp_path / "there")
    assert [value["environment"].pop("jobs_on_device") for value in here_found.values()] == [1] * len(jobs)
    assert [value["environment"].pop("jobs_on_device") for value in there_found.values()] == [2] * len(jobs)
    assert there_found == here_found


def test_a_job_can_be_pickled(tmp_path: Path) -> None:
    import pickle

    job = jobs_of(read_study(write_study(tmp_path)), tmp_path / "results", tmp_path / "runs")[0]
    assert pickle.loads(pickle.dumps((run_job, job))) == (run_job, job)
