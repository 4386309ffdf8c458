"""Running studies: what is missing and nothing else, through kills, failures and processes."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.common import open_run
from equipoise.errors import UserError
from equipoise.studies import runner
from equipoise.studies.design import read_study
from equipoise.studies.launch import Failure, here, jobs_on_device, processes
from equipoise.studies.reading import read_results
from equipoise.studies.record import record
from equipoise.studies.runner import Job, jobs_of, run_job, run_study, state
from equipoise.training import signals
from equipoise.training.measure import measure_trainer
from equipoise.training.run_folder import RunFolder
from killing import SERVER, launch
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


def test_a_finished_arm_is_never_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_study(tmp_path)
    run(source, tmp_path, only=["SGD"])
    before = {path: path.read_bytes() for path in (tmp_path / "results/little").glob("sgd-*.json")}
    assert len(before) == 2
    started: list[str] = []
    original = runner.run_job

    def counted(job: Job) -> str:
        started.append(job.arm)
        return original(job)

    monkeypatch.setattr(runner, "run_job", counted)
    sound, lines = run(source, tmp_path)
    assert sound
    assert started == ["A + B", "A + B"]
    assert lines[0] == "little: 2 of 4 to run"
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("moment", [("after a step", 16), ("after a line", 5), ("before the result", 2)])
def test_a_killed_study_goes_on_and_ends_as_an_undisturbed_one(tmp_path: Path, moment: tuple[str, int]) -> None:
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


def test_a_kill_right_at_the_start_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "runs/little/sgd-seed0"
    folder.mkdir(parents=True)
    (folder / ".recipe.yaml.tmp").write_text("mod")
    assert run(write_study(tmp_path), tmp_path, only=["SGD"], seeds=[0])[0]


def test_a_failing_arm_is_one_line_and_the_others_go_on(tmp_path: Path) -> None:
    arms = {"homeless": {"data": {"name": "cifar10", "root": f"{tmp_path}/nowhere"}}, **ARMS}
    words = ["study", write_study(tmp_path, arms, seeds=[0]), "--results", f"{tmp_path}/r", "--work", f"{tmp_path}/w"]
    assert launch(words, tmp_path / "log") == 1
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("little, ")]
    assert len(lines) == 3
    assert "homeless" in lines[0]
    assert "nowhere" in lines[0]
    assert len(list((tmp_path / "r/little").glob("*-seed0.json"))) == 2


def test_an_unforeseen_error_leaves_its_traceback_beside_the_run(
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


def test_a_result_of_another_recipe_is_neither_used_nor_written_over(tmp_path: Path) -> None:
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


def test_where_the_data_lies_is_no_part_of_a_result(tmp_path: Path) -> None:
    source = write_study(tmp_path, seeds=[0])
    run(source, tmp_path, data=tmp_path / "secret place")
    for path in (tmp_path / "results/little").glob("*.json"):
        assert "secret" not in path.read_text()
    sound, lines = run(source, tmp_path, data=tmp_path / "elsewhere")
    assert (sound, lines) == (True, ["little: 0 of 2 to run"])


def test_a_chosen_mode_of_correction_is_the_recipe_that_left_it_open(tmp_path: Path) -> None:
    source = write_study(tmp_path, {"AGENT": {"correction": "agent"}}, seeds=[0])
    assert run(source, tmp_path)[0]
    value = json.loads((tmp_path / "results/little/agent-seed0.json").read_text())
    assert value["recipe"]["correction"] == {"name": "agent", "mode": "replay"}
    assert run(source, tmp_path) == (True, ["little: 0 of 1 to run"])


def test_a_job_that_another_process_has_is_left_to_it(tmp_path: Path) -> None:
    source = write_study(tmp_path, seeds=[0])
    run(source, tmp_path, only=["SGD"])
    (tmp_path / "results/little/sgd-seed0.json").unlink()
    with held_by_another_process(tmp_path / "runs/little/sgd-seed0"):
        sound, lines = run(source, tmp_path)
    assert not sound
    assert "is being trained by another process" in lines[0]
    assert run(source, tmp_path)[0]


@pytest.mark.parametrize("part", [{"robust": "pgd10", "attacked": 200}, {"measure": True}], ids=["attack", "measure"])
def test_a_signal_while_the_final_weights_are_judged_is_obeyed(
    tmp_path: Path, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the attack, which may take an hour: what was trained is on the disk."""
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
def test_results_that_were_judged_otherwise_are_not_pooled(tmp_path: Path, change: dict[str, Any]) -> None:
    asked = {"robust": "pgd10", "attacked": 30, "seeds": [0]}
    run(write_study(tmp_path, {"SGD": {}}, **asked), tmp_path)
    assert run(write_study(tmp_path, {"SGD": {}}, **asked), tmp_path) == (True, ["little: 0 of 1 to run"])
    sound, lines = run(write_study(tmp_path, {"SGD": {}}, **asked | change), tmp_path)
    assert not sound
    assert "was attacked or measured differently; remove it" in lines[0]
    (tmp_path / "results/little/sgd-seed0.json").unlink()  # only the judging is done again
    assert run(write_study(tmp_path, {"SGD": {}}, **asked | change), tmp_path)[0]


def test_nothing_of_a_job_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    original = runner.record

    def watched(study: str, arm: str, trainer: Any, *rest: Any) -> Any:
        held.append(weakref.ref(trainer.parts.model))
        held.append(weakref.ref(trainer.parts.correction))
        if arm == "bad":
            raise RuntimeError("after all the work")
        return original(study, arm, trainer, *rest)

    monkeypatch.setattr(runner, "record", watched)
    gc.disable()  # so that the job itself must have collected
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
    assert log.read_text().splitlines()[1] == "little, A + B, seed 0: interrupted after 1 epochs"


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


# Launchers


def see(word: str) -> str:
    """A job: tell what the process was given, raise, or die."""
    if word == "wrong":
        raise UserError("wrong\ninput")
    if word == "error":
        raise KeyError("k")
    if word == "die":
        os._exit(7)
    return f"{word} {os.environ.get('CUDA_VISIBLE_DEVICES')} {os.getpid()}"


def test_here_gives_results_in_order_and_failures_as_lines() -> None:
    (a, first), (_, wrong), (_, error), (b, last) = here(see, ["a", "wrong", "error", "b"])
    assert (a, b) == ("a", "b")
    assert str(first).endswith(str(os.getpid()))
    assert str(last).startswith("b ")
    assert wrong == Failure("wrong input")
    assert isinstance(error, Failure)
    assert error.line == "KeyError: 'k'"
    assert "in see" in error.traceback


def test_processes_share_the_gpus_and_outlive_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    words = ["die", "a", "b", "wrong"]
    outcomes = dict(processes(2)(see, words))
    assert set(outcomes) == set(words)
    assert isinstance(outcomes["die"], Failure)
    assert "killed" in outcomes["die"].line
    assert outcomes["wrong"] == Failure("wrong input")
    told = [str(outcomes[word]).split() for word in ("a", "b")]
    assert {gpu for _, gpu, _ in told} <= {"3", "5"}
    assert str(os.getpid()) not in {process for _, _, process in told}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


def neighbours(_: int) -> int:
    return jobs_on_device()


@pytest.mark.parametrize(("gpus", "expected"), [("3,5", 2), ("", 3)])
def test_a_job_knows_how_many_share_its_device(gpus: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert dict(processes(3)(neighbours, [0, 1, 2])) == dict.fromkeys(range(3), expected)
    assert dict(processes(3)(neighbours, [0])) == {0: 1}
    assert jobs_on_device() == 1


def test_a_result_says_that_others_ran_beside_it(tmp_path: Path) -> None:
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
def test_a_run_that_learned_nothing_is_said_to(tmp_path: Path) -> None:
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


def wait_for_ever(folder: str) -> None:
    (Path(folder) / "process").write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.slow
def test_processes_end_with_the_one_that_began_them(tmp_path: Path) -> None:
    parent = SERVER.Process(target=begin_waiting, args=(str(tmp_path),))
    parent.start()
    file = tmp_path / "process"
    assert eventually(file.exists)
    child = int(file.read_text())
    assert alive(child)
    parent.kill()
    parent.join()
    assert eventually(lambda: not alive(child))


def begin_waiting(folder: str) -> None:
    list(processes(1)(wait_for_ever, [folder]))


def eventually(condition: Callable[[], bool], seconds: float = 40) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_no_jobs_need_no_process() -> None:
    assert list(processes(2)(see, [])) == []
    with pytest.raises(UserError, match="at least 1"):
        processes(0)


@pytest.mark.slow
def test_processes_and_here_come_to_the_same_results(tmp_path: Path) -> None:
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


def test_a_job_is_a_function_of_what_can_be_sent(tmp_path: Path) -> None:
    import pickle

    job = jobs_of(read_study(write_study(tmp_path)), tmp_path / "results", tmp_path / "runs")[0]
    assert pickle.loads(pickle.dumps((run_job, job))) == (run_job, job)
