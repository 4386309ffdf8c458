"""A signal stops a run after its step, with a checkpoint; a second signal stops it at once."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_helpers import write_image_folder
from equipoise.training import checkpoint, signals
from killing import SERVER, Point, launch
from train_helpers import assert_same_state, tiny, without_times

COMMAND = [sys.executable, "-m", "equipoise"]
STATUS: dict[signal.Signals, int] = {signal.SIGTERM: 143, signal.SIGINT: 130}


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as file:
        return subprocess.Popen([*COMMAND, *words], stdout=file, stderr=file, start_new_session=True)


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not seen() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def write(path: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump(tiny(**changes)))
    return str(path)


def lines(run: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_end(left: Path, right: Path) -> None:
    """The last checkpoint and the metrics are bit-identical; a stop writes one more checkpoint."""
    newest = [max((run / "checkpoints").glob("step-*")) for run in (left, right)]
    assert newest[0].name == newest[1].name
    assert_same_state(checkpoint.load(newest[0]), checkpoint.load(newest[1]), without="str seconds")
    assert lines(left) == lines(right)


# In this process


def stop_while_working(number: int, work: Callable[[], None]) -> None:
    with signals.stoppable("equipoise resume here"):
        signal.raise_signal(number)
        work()


def stopping(number: int, work: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    before = [signal.getsignal(each) for each in signals.NUMBERS]
    with pytest.raises(SystemExit) as stopped:
        stop_while_working(number, work)
    assert [signal.getsignal(each) for each in signals.NUMBERS] == before
    assert not signals.requested()
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize("number", STATUS)
def test_one_line_and_the_usual_status(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = stopping(number, signals.check, capsys)
    assert status == STATUS[number]
    assert said == f"equipoise: stopped by {number.name}; continue with `equipoise resume here`\n"


def test_work_that_ends_all_the_same_has_ended_well() -> None:
    with signals.stoppable("again"):
        signal.raise_signal(signal.SIGTERM)
        assert signals.requested()
    assert not signals.requested()
    signals.check()


def test_in_another_thread_signals_are_left_alone() -> None:
    def work() -> None:
        with signals.stoppable("again"):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[Any] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_errors_pass_through() -> None:
    with pytest.raises(KeyError), signals.stoppable("again"):
        raise KeyError


def twice(number: int) -> None:
    with signals.stoppable("again"):
        signal.raise_signal(number)
        signal.raise_signal(number)
        os._exit(0)


@pytest.mark.parametrize("number", STATUS)
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    process = SERVER.Process(target=twice, args=(number,))
    process.start()
    process.join(60)
    assert process.exitcode == STATUS[number]


def child_of_a_run(number: int) -> None:
    """Fork while the signals are handled, as processes that read images are."""
    with signals.stoppable("again"):
        child = os.fork()
        if child == 0:
            signal.raise_signal(number)
            os._exit(7)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 7)])
def test_processes_that_read_images_leave_interrupts_to_the_run(number: signal.Signals, status: int) -> None:
    process = SERVER.Process(target=child_of_a_run, args=(number,))
    process.start()
    process.join(60)
    assert process.exitcode == status


# A run

STORAGES = ["masked", "packed"]
STOPS = [
    [Point("step", 1), Point("step", 6)],  # the last step of an epoch
    [Point("refresh", 2, 40), Point("evaluation", 1, 30)],
    [Point("update", 2, 5), Point("checkpoint", 1, 10), Point("line", 1)],
]


@pytest.mark.parametrize(("number", "storage"), list(zip(STATUS, STORAGES, strict=True)))
@pytest.mark.parametrize("stops", STOPS)
def test_a_run_that_was_stopped_ends_bit_equal(
    tmp_path: Path, number: signal.Signals, storage: str, stops: list[Point]
) -> None:
    recipe = write(tmp_path / "r.yaml", epochs=4, correction="agent", storage=storage, checkpoint={"every": 2})
    whole, stopped, log = tmp_path / "whole", tmp_path / "stopped", tmp_path / "log"
    assert launch(["train", recipe, "--out", str(whole)], log) == 0
    words = ["train", recipe, "--out", str(stopped)]
    for stop in stops:
        assert launch(words, log, replace(stop, signal=number)) == STATUS[number], log.read_text()
        said = log.read_text().splitlines()[-1]
        assert said == f"equipoise: stopped by {number.name}; continue with `equipoise resume {stopped}`"
        words = ["resume", str(stopped)]
    assert launch(words, log) == 0, log.read_text()
    assert_same_end(whole, stopped)


def test_a_run_stopped_from_outside(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.yaml", epochs=2000)
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(["train", recipe, "--out", str(run)], log)
    wait_for((run / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()
    assert log.read_text().splitlines()[-1].endswith(f"continue with `equipoise resume {run}`")
    assert checkpoint.Store(run / "checkpoints").newest() is not None


def test_a_signal_to_a_run_and_the_processes_that_read_its_images(tmp_path: Path) -> None:
    """As systemd and Slurm send it: the step is finished and saved."""
    write_image_folder(tmp_path / "data", each=20)
    data = {"name": "folder", "root": str(tmp_path / "data"), "size": 8, "batch": 2, "workers": 2}
    model = {"name": "mlp", "hidden": 16, "size": 8}
    recipe = write(tmp_path / "r.yaml", epochs=2000, model=model, data=data, checkpoint={"steps": 2})
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(["train", recipe, "--out", str(run)], log)
    wait_for(lambda: any((run / "checkpoints").glob("step-*")), process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()
    said = log.read_text().splitlines()
    assert said[-1] == f"equipoise: stopped by SIGTERM; continue with `equipoise resume {run}`"
    assert not [line for line in said if "Traceback" in line or "DataLoader" in line]
    newest = checkpoint.Store(run / "checkpoints").newest()
    assert newest is not None
    assert 0 < newest["position"][1] < 30  # inside an epoch


# A study


def study_of(folder: Path, epochs: int) -> list[str]:
    """The command line of a study with two arms."""
    write(folder / "tiny.yaml", epochs=epochs)
    study = {"title": "T", "recipe": "tiny.yaml", "seeds": [0], "arms": {"a": {}, "b": {"ema": 0.5}}}
    (folder / "s.yaml").write_text(yaml.safe_dump(study))
    return ["study", str(folder / "s.yaml"), "--results", str(folder / "r"), "--work", str(folder / "w")]


@pytest.mark.parametrize("number", STATUS)
def test_a_study_stops_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    chosen = ["--seeds", "0", "--only", "a", "--only", "b"]
    words, log = [*study_of(tmp_path, 2), *chosen], tmp_path / "log"
    assert launch(words, log, Point("step", 4, signal=number)) == STATUS[number], log.read_text()
    advice = f"continue with `equipoise {shlex.join(words)}`"
    assert log.read_text().splitlines()[-1] == f"equipoise: stopped by {number.name}; {advice}"
    runs = sorted(path.name for path in (tmp_path / "w" / "s").iterdir())
    assert runs == ["a-seed0"]  # the other was not begun
    assert launch(words, log) == 0, log.read_text()
    assert len(list((tmp_path / "r" / "s").glob("*-seed0.json"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", STATUS)
def test_a_study_in_processes_stops_them(tmp_path: Path, number: signal.Signals) -> None:
    words, log = study_of(tmp_path, 300), tmp_path / "log"
    process = start([*words, "--jobs", "2"], log)
    wait_for((tmp_path / "w" / "s" / "a-seed0" / "metrics.jsonl").exists, process)
    os.killpg(process.pid, number)  # as a terminal or systemd does, to all processes at once
    assert process.wait(60) == STATUS[number], log.read_text()
    said = log.read_text().splitlines()
    assert said[-1].startswith(
        f"equipoise: stopped by {number.name}; continue with `equipoise study {words[1]} --results "
    )
    assert "Traceback" not in log.read_text()
    assert checkpoint.Store(tmp_path / "w" / "s" / "a-seed0" / "checkpoints").newest() is not None
    assert not list((tmp_path / "r").rglob("a-seed0.json"))
