"""The outcome of a command, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Outcome]
"""A command line by its words; see the fixture `run`."""


def everything(folder: Path) -> dict[str, bytes]:
    """The contents of all files in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(outcome: Outcome, told: str) -> None:
    """One line of error that contains `told`, status 2, and nothing else."""
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("equipoise: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert told in outcome.err
    assert "Traceback" not in outcome.err
