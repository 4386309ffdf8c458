"""Threads and processes that work on one model, one recipe or one run at the same time."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import yaml

from equipoise.deploy.frozen import freeze
from fork_helpers import assert_forks_compute
from harness import concurrent_calls
from harness.commands import told
from harness.tally import Tally
from killing import PATIENCE, launch, start
from train_helpers import assert_same_runs, tiny

TRACES = re.compile(r"Traceback|Segmentation|Aborted")


def threads(random: Random, folder: Path) -> None:
    """Several threads call one packed or frozen model with inputs of different sizes, or train copies of one."""
    wrong = concurrent_calls.run(random)
    assert not wrong, wrong


def forks(random: Random, folder: Path) -> None:
    """Children are forked while a thread computes; each must compute the same as its parent."""
    torch.manual_seed(random.randrange(2**31))
    model = concurrent_calls.network(random.randint(4, 24), random.randint(1, 2)).eval()
    model = freeze(model) if random.random() < 0.5 else model
    assert_forks_compute(model, torch.randn(2, 3, 8, 8), torch.randn(32, 3, 16, 16), times=3)


def _statuses(lines: list[list[str]], folder: Path) -> tuple[list[int | None], list[str]]:
    """Run command lines at the same time in one folder; return their statuses and what they printed."""
    logs = [folder / f"log {i}" for i in range(len(lines))]
    processes = [start(words, log, folder=folder) for words, log in zip(lines, logs, strict=True)]
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    printed = [log.read_text() for log in logs]
    assert not [text for text in printed if TRACES.search(text)], printed
    return [process.exitcode for process in processes], printed


def _recipe(random: Random, folder: Path) -> None:
    storage, correction = random.choice(("masked", "packed")), random.choice(("sgd", "agent", "saga"))
    recipe = tiny(epochs=2, storage=storage, correction=correction, checkpoint={"steps": random.randint(1, 4)})
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))


def trains(random: Random, folder: Path) -> None:
    """Several `equipoise train` of one recipe: each has a folder, and all runs are bit-identical."""
    _recipe(random, folder)
    count = random.randint(2, 4)
    statuses, printed = _statuses([["train", "tiny.yaml"]] * count, folder)
    assert statuses == [0] * count, printed
    runs = sorted((folder / "runs").iterdir())
    assert len(runs) == count, runs
    for run in runs[1:]:
        assert_same_runs(runs[0], run)


def trains_of_one_folder(random: Random, folder: Path) -> None:
    """Several `equipoise train --out` of one folder: the first gets it, the others are refused in one line."""
    _recipe(random, folder)
    count = random.randint(2, 4)
    statuses, printed = _statuses([["train", "tiny.yaml", "--out", "run"]] * count, folder)
    _assert_one_worked(statuses, printed)
    assert launch(["train", str(folder / "tiny.yaml"), "--out", str(folder / "whole")], folder / "log") == 0
    assert_same_runs(folder / "whole", folder / "run")


def resumes(random: Random, folder: Path) -> None:
    """Several `equipoise resume` of a run that was killed, and readers: one trains, the others are refused."""
    _recipe(random, folder)
    (folder / "log").touch()
    words = ["train", str(folder / "tiny.yaml"), "--out"]
    assert launch([*words, str(folder / "whole")], folder / "log") == 0, (folder / "log").read_text()
    trap = ("after a step", random.randint(2, 10))
    assert launch([*words, str(folder / "run")], folder / "log", trap) == -signal.SIGKILL
    count = random.randint(2, 3)
    reader = random.choice([["show", "run"], ["eval", "run"], ["report", "run", "-o", "out.html"]])
    statuses, printed = _statuses([["resume", "run"]] * count + [reader], folder)
    assert statuses[-1] in (0, 2), printed[-1]
    _assert_one_worked(statuses[:-1], printed[:-1], at_least=True)
    assert_same_runs(folder / "whole", folder / "run")


def _assert_one_worked(statuses: list[int | None], printed: list[str], at_least: bool = False) -> None:
    """One process ended well and the others with one line. A resume may find the run finished, which is well too."""
    assert set(statuses) <= {0, 2}, printed
    assert statuses.count(0) >= 1 if at_least else statuses.count(0) == 1, printed
    for status, text in zip(statuses, printed, strict=True):
        complaints = [line for line in text.splitlines() if "warning" not in line]
        assert status == 0 or len(complaints) == 1, text


# how many of 20 runs are of each kind
KINDS: dict[str, tuple[int, Callable[[Random, Path], None]]] = {
    "threads on one packed or frozen model, or on copies of one in training": (10, threads),
    "forks while a thread computes": (4, forks),
    "`equipoise train` of one recipe by two to four processes": (2, trains),
    "`equipoise train --out` of one folder by two to four processes": (2, trains_of_one_folder),
    "`equipoise resume` of one run by two or three processes, and a reader": (2, resumes),
}
ORDER = [name for name, (share, _) in KINDS.items() for _ in range(share)]


def run_together(
    first: int, count: int, seed: int, folder: Path, tally: Tally, note: Callable[[str], None] = lambda _: None
) -> None:
    """Make `count` concurrent runs."""
    for number in range(first, first + count):
        kind = Random(f"{seed} {number // len(ORDER)}").sample(ORDER, len(ORDER))[number % len(ORDER)]
        name = f"{kind}, {number} of seed {seed}"
        note(name)
        folder.mkdir(parents=True)
        try:
            KINDS[kind][1](Random(f"{seed} concurrent {number}"), folder)
        except Exception as error:
            tally.failures.append(f"{name}: {told(error)}")
        shutil.rmtree(folder)
        tally.concurrent[kind] += 1
