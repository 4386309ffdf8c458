"""A campaign of faults: kill runs, feed wrong input, run threads and processes together, and collect what fails."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from harness.concurrency import run_together
from harness.damage import try_files
from harness.file_kinds import FILES
from harness.generation import GENERATED, generated
from harness.kills import kill
from harness.page import page
from harness.sanitizers import Sanitized, missing, sanitize
from harness.subjects import HEAVY, subjects
from harness.tally import Tally
from harness.workers import work
from killing import PRELOADED, SERVER

SIGNED = 18  # percent of all inputs; damaged files share what GENERATED leaves
TOGETHER, CALLS, THREADS = 10, 500, 100  # in one unit of work


@dataclass
class Found:
    """The results of a campaign.

    Args:
        seed: Its seed.
        tally: What was counted.
        seconds: Its duration.
        environment: Date, versions and number of processes, for the page.
        cut_short: Whether it was stopped early.
    """

    seed: int
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    environment: str = ""
    cut_short: bool = False


class Shard(NamedTuple):
    """Inputs of one kind."""

    name: str
    first: int
    count: int


def shares(count: int) -> dict[str, int]:
    """Divide `count` inputs, or a few more, among the kinds."""
    made = {name: -(-count * percent // 100) for name, percent in GENERATED.items()}
    signed = [kind.name for kind in FILES if kind.signed]
    made |= {name: -(-count * SIGNED // 100 // len(signed)) for name in signed}
    damaged = [kind.name for kind in FILES if not kind.signed]
    return made | {name: max(-(-(count - sum(made.values())) // len(damaged)), 1) for name in damaged}


@cache
def shards(count: int) -> list[Shard]:
    """Divide `count` inputs into shards; all kinds progress evenly."""
    size = max(1, min(100, count // 100))
    found = [
        (first / whole, Shard(name, first, min(size, whole - first)))
        for name, whole in shares(count).items()
        for first in range(0, whole, size)
    ]
    return [shard for _, shard in sorted(found)]


class Unit(NamedTuple):
    """A piece of a campaign that one process does at a time.

    Args:
        part: A key of `PARTS`.
        number: Its number in the part.
        seed: Seed of the campaign.
        asked: The counts that the whole campaign reaches, by part.
    """

    part: str
    number: int
    seed: int
    asked: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.part} {self.number} of seed {self.seed}"


Note = Callable[[str], None]


def _kill(unit: Unit, folder: Path, tally: Tally, note: Note) -> None:
    """Kill and resume one run."""
    order = subjects(unit.seed)
    kill(order[unit.number % len(order)], f"{unit.seed} {unit.number}", folder, tally)


def _feed(unit: Unit, folder: Path, tally: Tally, note: Note) -> None:
    """Try one shard of wrong inputs."""
    order = shards(unit.asked["inputs"])
    again, index = divmod(unit.number, len(order))  # again if processes died
    shard, seed = order[index], unit.seed + again
    kind = next((kind for kind in FILES if kind.name == shard.name), None)
    if kind is None:
        generated(shard.name, shard.count, seed * 1_000_000 + shard.first, folder, tally)
    else:
        try_files(kind, folder, shard.count, seed, tally, shard.first, note)


def _together(unit: Unit, folder: Path, tally: Tally, note: Note) -> None:
    """Make concurrent runs."""
    count = min(TOGETHER, unit.asked["concurrent"])
    run_together(unit.number * count, count, unit.seed, folder, tally, note)


def _sanitize(unit: Unit, folder: Path, tally: Tally, note: Note) -> None:
    """Make kernel calls under AddressSanitizer and UBSan, or concurrent calls under ThreadSanitizer."""
    found, seed = Sanitized(), unit.seed * 1000 + unit.number
    asked = unit.asked[unit.part]
    calls, runs = (min(CALLS, asked), 0) if unit.part == "calls" else (0, min(THREADS, asked))
    sanitize(calls, runs, seed, folder.parent / "sanitizers", found)
    tally.calls.update(found.calls)
    tally.failures += found.failures


_LABELS = {"calls": "AddressSanitizer", "threads": "ThreadSanitizer"}


def _calls(tally: Tally, label: str) -> int:
    return sum(count for name, count in tally.calls.items() if name.startswith(label))


PARTS: dict[str, tuple[Callable[[Unit, Path, Tally, Note], None], Callable[[Tally], int]]] = {
    "kills": (_kill, lambda tally: tally.kills.total()),
    "inputs": (_feed, lambda tally: tally.inputs.total()),
    "concurrent": (_together, lambda tally: tally.concurrent.total()),
    "calls": (_sanitize, lambda tally: _calls(tally, _LABELS["calls"])),
    "threads": (_sanitize, lambda tally: _calls(tally, _LABELS["threads"])),
}
"""What does a unit of each part, and the count that the part has reached."""


def do(unit: Unit, folder: Path, tally: Tally, note: Note) -> None:
    """Do one unit, in a process for such work."""
    torch.set_num_threads(1)
    SERVER.set_forkserver_preload([*PRELOADED, *HEAVY])
    PARTS[unit.part][0](unit, folder, tally, note)


def run_campaign(found: Found, asked: Mapping[str, int], jobs: int, folder: Path, minutes: float = 0.0) -> None:
    """Run a campaign until every part has reached its count.

    Args:
        found: Extended.
        asked: The counts, by part.
        jobs: Number of processes.
        folder: An empty folder.
        minutes: No work is begun after so many minutes; 0 for no limit.
    """
    started, said = time.monotonic(), 0.0
    if (asked["calls"] or asked["threads"]) and (reason := missing()):
        found.tally.failures.append(f"no call under sanitizers was made: {reason}")
        asked = {**asked, "calls": 0, "threads": 0}
    given = dict.fromkeys(asked, 0)

    def next_unit() -> Unit | None:
        """The next unit of the part that is the furthest from its count."""
        progress = {part: PARTS[part][1](found.tally) / count for part, count in asked.items() if count}
        open_parts = {part: value for part, value in progress.items() if value < 1}
        if not open_parts:
            return None
        if minutes and time.monotonic() - started > 60 * minutes:
            found.cut_short = True
            return None
        # parts that are as far: the one with fewer units
        part = min(open_parts, key=lambda name: (open_parts[name], given[name]))
        given[part] += 1
        return Unit(part, given[part] - 1, found.seed, asked)

    for tally in work(do, next_unit, jobs, folder):
        found.tally.add(tally)
        print(*tally.failures, sep="\n", end="\n" if tally.failures else "")
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{(said - started) / 60:.1f} min: {found.tally}, {len(found.tally.failures)} failures")
    found.seconds = time.monotonic() - started


class CutShort(BaseException):
    """The campaign was stopped by a signal."""


@contextlib.contextmanager
def until_a_signal(found: Found) -> Iterator[None]:
    """End the block at SIGTERM and Ctrl-C."""

    def stop(*_: object) -> None:
        raise CutShort

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except CutShort:
        found.cut_short = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_page(found: Found, path: Path, overwrite: bool) -> Path:
    """Write the page; after a campaign that was stopped early, one with the suffix .part.md instead."""
    if found.cut_short and not overwrite:
        path = path.with_suffix(".part.md")
    path.write_text(page(found), encoding="utf-8")
    return path
