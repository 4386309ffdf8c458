"""Kill runs at random points, damage and resume them. They must end bit-identical to undisturbed runs."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import yaml

from equipoise.errors import UserError
from equipoise.training.checkpoint import Store
from harness.tally import Tally
from killing import Point, launch, launch_group
from train_helpers import BATCHES, assert_same_runs, tiny

EPOCHS = 3
KILLED = -9
LONGEST = 0.35  # seconds; a run takes slightly longer in a process that has loaded everything

TOPOLOGIES = (
    "static",
    "set",
    "rigl",
    "srigl",
    "snfs",
    "mest",
    "gmp",
    "granet",
    "sr-ste",
    "bsr-net",
    "rigl-itop",
    "hydra",
)
CORRECTIONS: dict[str, Any] = {
    "sgd": "sgd",
    "agent, recompute": {"name": "agent", "mode": "recompute"},
    "agent, replay": {"name": "agent", "mode": "replay"},
    "agent, running": {"name": "agent", "mode": "running"},
    "agent, c per layer": {"name": "agent", "coefficient": {"name": "gradient", "per_layer": True}, "gamma": 1.0},
    "svrg, every 4": {"name": "svrg", "mode": "replay", "every": 4},
    "alpha-svrg": "alpha-svrg",
    "mvr": "mvr",
    "agent-mvr": "agent-mvr",
    "saga": "saga",
}
STORAGES = ("masked", "packed")
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "lr": 0.05},
    {"name": "adam", "lr": 0.005},
    {"name": "adamw", "lr": 0.005, "decay_all": False},
    {"name": "sgdw", "lr": 0.02},
)
# how often each happens in a run, at most
PLACES = {
    "step": EPOCHS * BATCHES,
    "refresh": 5,
    "update": 9,
    "checkpoint": 6,
    "evaluation": EPOCHS + 1,
    "line": EPOCHS,
    "result": 1,
}


class Subject(Protocol):
    """A run that can be killed and continued.

    Everything is written to a folder: `NAME` is the undisturbed or the killed run, the rest is shared.
    """

    @property
    def kind(self) -> str:
        """The kind of run, for the page."""

    @property
    def places(self) -> Mapping[str, int]:
        """The functions inside which it is killed, and how often each is called at most; the first one always is."""

    @property
    def longest(self) -> float:
        """Seconds after which it is killed from outside, at most."""

    def prepare(self, folder: Path, random: Random) -> None: ...

    def run(self, folder: Path, name: str, random: Random, trap: Point | float | None = None) -> int:
        """Start the run, or continue it if it has been started; return the exit status."""

    def compare(self, folder: Path, one: str, other: str) -> None:
        """Fail if a bit of the two runs differs."""

    def stores(self, folder: Path, name: str) -> list[Path]:
        """List the folders whose newest checkpoint may be damaged."""


@dataclass(frozen=True)
class Pipeline:
    """A run of a topology, a correction and a storage, in one process or in several that train together."""

    topology: str
    correction: str
    storage: str
    processes: int = 1

    places = PLACES
    longest = LONGEST

    @property
    def kind(self) -> str:
        return ("one process", "two processes", "three processes")[self.processes - 1]

    def __str__(self) -> str:
        return f"{self.topology}, {self.correction}, {self.storage}, {self.kind}"

    def prepare(self, folder: Path, random: Random) -> None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe(random)))

    def recipe(self, random: Random) -> dict[str, Any]:
        moving: dict[str, Any] = {"every": 2}
        if self.topology in ("static", "bsr-net"):
            moving = {"distribution": "erk"}
        if self.topology == "sr-ste":
            moving = {"pattern": "fan_in"}
        if self.topology == "hydra":
            moving = {"begin": 0.3, "until": 0.7}
        return tiny(
            epochs=EPOCHS,
            topology={"name": self.topology, "sparsity": 0.8, **moving},
            correction=CORRECTIONS[self.correction],
            storage=self.storage,
            optimizer=random.choice(OPTIMIZERS),
            ema=random.choice((0, 0.9)),
            clip=random.choice((0, 0, 0.5)),
            checkpoint={"steps": random.randint(0, 7), "keep": random.randint(1, 3)},
        )

    def run(self, folder: Path, name: str, random: Random, trap: Point | float | None = None) -> int:
        words, log = _command(folder / "recipe.yaml", folder / name), folder / "log"
        if self.processes == 1:
            return launch(words, log, trap)
        return launch_group(words, self.processes, log, trap, rank=random.randrange(self.processes))

    def compare(self, folder: Path, one: str, other: str) -> None:
        assert_same_runs(folder / one, folder / other)

    def stores(self, folder: Path, name: str) -> list[Path]:
        return [folder / name / "checkpoints"]


def pipelines(processes: int = 1) -> list[Pipeline]:
    """List every topology with every correction in both storages; SR-STE and HYDRA have one."""
    parts = itertools.product(TOPOLOGIES, CORRECTIONS, STORAGES)
    masked = [(topology, "packed") for topology in ("sr-ste", "hydra")]
    return [Pipeline(*part, processes) for part in parts if (part[0], part[2]) not in masked]


def kill(subject: Subject, seed: str, folder: Path, tally: Tally) -> None:
    """Kill a run several times, continue it to its end, and compare it with an undisturbed one."""
    folder.mkdir(parents=True)
    started = time.monotonic()
    try:
        _kill(subject, Random(seed), folder, tally)
    except (AssertionError, UserError) as error:
        tally.failures.append(f"run {seed} ({subject}): {' '.join(str(error).split())[-400:]}")
    shutil.rmtree(folder)
    tally.runs[subject.kind] += 1
    tally.pipelines.add(str(subject))
    tally.kill_seconds += time.monotonic() - started


def _kill(subject: Subject, random: Random, folder: Path, tally: Tally) -> None:
    log = folder / "log"
    subject.prepare(folder, random)
    assert subject.run(folder, "whole", random) == 0, log.read_text()
    before = tally.kills.total()
    for trap in _traps(subject, random):
        status = subject.run(folder, "killed", random, trap)
        assert status in (0, KILLED), log.read_text()
        if status == 0:
            break
        tally.kills[trap.place if isinstance(trap, Point) else "any moment"] += 1
        if random.random() < 0.2:
            tally.damages += sum(_damage(store, random) for store in subject.stores(folder, "killed"))
    if tally.kills.total() == before:  # this run did not reach the points
        shutil.rmtree(folder / "killed")
        place, calls = next(iter(subject.places.items()))
        point = Point(place, random.randint(1, calls // 2))
        assert subject.run(folder, "killed", random, point) == KILLED, log.read_text()
        tally.kills[place] += 1
    # also if the run was finished: its last checkpoint may have been damaged
    assert subject.run(folder, "killed", random) == 0, log.read_text()
    subject.compare(folder, "whole", "killed")
    left = [str(path.relative_to(folder)) for path in (folder / "killed").rglob("*") if path.name.endswith(".tmp")]
    assert not left, f"temporary files are left: {left}"


def _traps(subject: Subject, random: Random) -> list[Point | float]:
    """Draw points at which a run is killed: inside a function, or after a number of seconds."""
    found: list[Point | float] = []
    for _ in range(random.randint(3, 6)):
        place = random.choice((*subject.places, "any moment"))
        if place == "any moment":
            found.append(random.uniform(0.02, subject.longest))
        else:
            lines = int(10 ** random.uniform(0, 2.7)) - 1
            found.append(Point(place, random.randint(1, max(1, subject.places[place] // 2)), lines))
    return found


def _command(recipe: Path, run: Path) -> list[str]:
    """Return the command that starts the run or, if it has been started, resumes it."""
    if (run / "recipe.yaml").exists():
        return ["resume", str(run)]
    return ["train", str(recipe), "--out", str(run)]


def _damage(store: Path, random: Random) -> int:
    """Truncate the newest checkpoint or flip one of its bits; return the number of damaged checkpoints."""
    paths = Store(store).paths()
    if not paths:
        return 0
    content = bytearray(paths[0].read_bytes())
    index = random.randrange(len(content))
    if random.random() < 0.5:
        content = content[:index]
    else:
        content[index] ^= 1 << random.randrange(8)
    os.unlink(paths[0])  # the best may be a link to it
    paths[0].write_bytes(content)
    return 1
