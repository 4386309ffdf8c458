"""Launchers: every job has a result or a failure, whatever becomes of its process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.errors import UserError
from equipoise.studies.launch import Failure, here, processes
from killing import SERVER


def see(word: str, _: int) -> str:
    """A job that returns what its process was given, raises, or kills its process."""
    if word == "wrong":
        raise UserError("wrong\ninput")
    if word == "error":
        raise KeyError("k")
    if word == "die":
        os._exit(7)
    if word == "die later":
        threading.Timer(0.2, os._exit, [7]).start()
    return f"{word} {os.environ.get('CUDA_VISIBLE_DEVICES')} {os.getpid()}"


def test_here_yields_results_in_order_and_failures_as_lines() -> None:
    (a, first), (_, wrong), (_, error), (b, last) = here(see, ["a", "wrong", "error", "b"])
    assert (a, b) == ("a", "b")
    assert str(first).endswith(str(os.getpid()))
    assert str(last).startswith("b ")
    assert wrong == Failure("wrong input")
    assert isinstance(error, Failure)
    assert error.line == "KeyError: 'k'"
    assert "in see" in error.traceback


@pytest.mark.slow
def test_processes_share_the_gpus_and_survive_the_death_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
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


def neighbours(_: int, on_device: int) -> int:
    return on_device


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "expected"), [("3,5", 2), ("", 3)])
def test_a_job_knows_how_many_share_its_device(gpus: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert dict(processes(3)(neighbours, [0, 1, 2])) == dict.fromkeys(range(3), expected)
    assert dict(processes(3)(neighbours, [0])) == {0: 1}
    assert dict(here(neighbours, [0])) == {0: 1}


@pytest.mark.slow
def test_a_process_that_dies_between_two_jobs_is_replaced() -> None:
    outcomes = processes(1)(see, ["die later", "a"])
    first = str(next(outcomes)[1]).split()[-1]
    assert eventually(lambda: not alive(int(first)))
    time.sleep(1)  # until the death has been noticed
    ((job, second),) = outcomes
    assert job == "a"
    assert not isinstance(second, Failure)
    assert str(second).split()[-1] != first


def wait_long(folder: str, _: int) -> None:
    (Path(folder) / "process").write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    parent = SERVER.Process(target=start_waiting, args=(str(tmp_path),))
    parent.start()
    file = tmp_path / "process"
    assert eventually(file.exists)
    child = int(file.read_text())
    assert alive(child)
    parent.kill()
    parent.join()
    assert eventually(lambda: not alive(child))


def start_waiting(folder: str) -> None:
    list(processes(1)(wait_long, [folder]))


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
