"""The processes of a fault campaign. They import this file, so it imports little."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from harness.tally import Tally
from harness.workers import work


def attempt(unit: str, folder: Path, tally: Tally, note: Callable[[str], None]) -> None:
    """A unit of work that may crash."""
    note(f"{unit}, second input")
    if unit == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    tally.inputs[unit] += 1


def test_a_crash_is_a_failure_and_the_work_is_continued(tmp_path: Path) -> None:
    units = iter(["a", "crash", "b", "c"])
    found = Tally()
    for tally in work(attempt, lambda: next(units, None), 2, tmp_path):
        found.add(tally)
    assert found.inputs == {"a": 1, "b": 1, "c": 1}
    assert found.failures == ["crash, second input: the process died with status -11"]
