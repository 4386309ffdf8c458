"""Kill runs at random points, damage and resume them. They must end bit-identical to undisturbed runs."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from equipoise.errors import UserError
from equipoise.training.checkpoint import Store
from killing import Point, launch, launch_two
from train_helpers import BATCHES, assert_same_runs, tiny

EPOCHS = 3
KILLED = -9
LONGEST = 0.35  # seconds; a run takes slightly longer in a process that has loaded everything

TOPOLOGIES = ("static", "set", "rigl", "srigl", "snfs", "mest", "gmp", "granet", "sr-ste", "bsr-net", "rigl-itop")
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


@dataclass(frozen=True)
class Pipeline:
    """A topology, a correction and a storage."""

    topology: str
    correction: str
    storage: str
    processes: int = 1

    def __str__(self) -> str:
        together = ", two processes" if self.processes == 2 else ""
        return f"{self.topology}, {self.correction}, {self.storage}{together}"

    def recipe(self, random: Random) -> dict[str, Any]:
        moving: dict[str, Any] = {"every": 2}
        if self.topology in ("static", "bsr-net"):
            moving = {"distribution": "erk"}
        if self.topology == "sr-ste":
            moving = {"pattern": "fan_in"}
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


def pipelines(processes: int = 1) -> list[Pipeline]:
    """List every topology with every correction in both storages; SR-STE has one."""
    parts = itertools.product(TOPOLOGIES, CORRECTIONS, STORAGES)
    return [Pipeline(*part, processes) for part in parts if (part[0], part[2]) != ("sr-ste", "packed")]


@dataclass
class Tally:
    """Numbers of runs, kills and damaged checkpoints, and the failures."""

    runs: int = 0
    pipelines: set[Pipeline] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)
    damages: int = 0
    failures: list[str] = field(default_factory=list)


def kill_runs(folder: Path, count: int, seed: int, processes: int = 1) -> Iterator[Tally]:
    """Kill and resume `count` runs, each of another pipeline until all have had one; yield the tally after each."""
    order = pipelines(processes)
    Random(f"{seed} order").shuffle(order)
    tally = Tally()
    for number, pipeline in zip(range(count), itertools.cycle(order)):
        random = Random(f"{seed} {number}")
        work = folder / f"{number}"
        work.mkdir(parents=True)
        try:
            _kill_run(work, pipeline, random, tally)
        except (AssertionError, UserError) as error:
            tally.failures.append(f"run {number} of seed {seed} ({pipeline}): {' '.join(str(error).split())[:300]}")
        else:
            shutil.rmtree(work)
        tally.runs += 1
        tally.pipelines.add(pipeline)
        yield tally


def _kill_run(folder: Path, pipeline: Pipeline, random: Random, tally: Tally) -> None:
    recipe, whole, killed, log = (folder / name for name in ("recipe.yaml", "whole", "killed", "log"))
    recipe.write_text(yaml.safe_dump(pipeline.recipe(random)))
    assert _launch(pipeline, ["train", str(recipe), "--out", str(whole)], log) == 0, log.read_text()
    before = tally.kills.total()
    for trap in _traps(random):
        status = _launch(pipeline, _command(recipe, killed), log, trap, rank=random.randrange(2))
        assert status in (0, KILLED), log.read_text()
        if status == 0:
            break
        tally.kills[trap.place if isinstance(trap, Point) else "any moment"] += 1
        if random.random() < 0.2:
            tally.damages += _damage(killed, random)
    if tally.kills.total() == before:  # this pipeline did not reach the points
        shutil.rmtree(killed)
        point = Point("step", random.randint(1, EPOCHS * BATCHES // 2))
        assert _launch(pipeline, _command(recipe, killed), log, point) == KILLED, log.read_text()
        tally.kills["step"] += 1
    # also if the run was finished: its last checkpoint may have been damaged
    assert _launch(pipeline, _command(recipe, killed), log) == 0, log.read_text()
    assert_same_runs(whole, killed)
    assert not [path for path in killed.rglob("*") if path.name.endswith(".tmp")]


def _launch(pipeline: Pipeline, words: list[str], log: Path, trap: Point | float | None = None, rank: int = 0) -> int:
    return launch(words, log, trap) if pipeline.processes == 1 else launch_two(words, log, trap, rank)


def _traps(random: Random) -> list[Point | float]:
    """Draw one to three points at which a run is killed: inside a function, or after a number of seconds."""
    found: list[Point | float] = []
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.choice((*PLACES, "any moment"))
        if place == "any moment":
            found.append(random.uniform(0.02, LONGEST))
        else:
            lines = int(10 ** random.uniform(0, 2.7)) - 1
            found.append(Point(place, random.randint(1, max(1, PLACES[place] // 2)), lines))
    return found


def _command(recipe: Path, run: Path) -> list[str]:
    """Return the command that starts the run or, if it has been started, resumes it."""
    if (run / "recipe.yaml").exists():
        return ["resume", str(run)]
    return ["train", str(recipe), "--out", str(run)]


def _damage(run: Path, random: Random) -> int:
    """Truncate the newest checkpoint or flip one of its bits; return the number of damaged checkpoints."""
    paths = Store(run / "checkpoints").paths()
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
