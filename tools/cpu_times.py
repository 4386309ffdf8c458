"""Time to an accuracy on CPU cores: what bench/cpu_accuracy.py measured, and what README and the charts say about it.

Arms with overrides of the recipe other than `precision=bf16` are left out, and so are arms on fewer cores if there are
some on more. Arms that were stopped after some steps have no accuracy of their own; their time is that of a step times
the steps of the whole training. Training that was only timed has the accuracies of the same training on a GPU, at every
number of epochs that was run there.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CORES = {1: "one CPU core", 2: "two CPU cores"}
NAMES = {
    "sparse": "sparse, 99 %",
    "sparse bf16": "sparse, 99 %, bf16 activations",
    "bf16": "dense, bf16",
    "float32": "dense, float32",
    "published": "SET-ITOP as published, 99 %, packed",
    "published bf16": "SET-ITOP as published, 99 %, packed, bf16 activations",
}
ARM = re.compile(r"(\w+),? (\d+)(?:, precision=(bf16))?")
Line = dict[str, Any]


class Arm(NamedTuple):
    """The runs of a training of some epochs.

    Attributes:
        kind: A key of `NAMES`.
        epochs: Its number of epochs.
        accuracies: Final test accuracy in percent of each run; empty if only its steps were timed.
        times: Minutes of the training steps of each run.
        process: Minutes of a whole process, the mean over runs; `None` if only steps were timed.
        on_gpu: Whether the accuracies are those of the same training on a GPU.
    """

    kind: str
    epochs: int
    accuracies: tuple[float, ...]
    times: tuple[float, ...]
    process: float | None
    on_gpu: bool = False

    @property
    def accuracy(self) -> float | None:
        return statistics.mean(self.accuracies) if self.accuracies else None

    @property
    def minutes(self) -> float:
        return statistics.mean(self.times)


class Measured(NamedTuple):
    """All arms; `shared` says that other programs used the cores, so that minutes are those of the processor."""

    arms: tuple[Arm, ...] = ()
    threads: int = 2
    shared: bool = False
    processor: str = ""

    @property
    def cores(self) -> str:
        return CORES.get(self.threads, f"{self.threads} CPU cores")

    def of(self, *kinds: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.kind in kinds]


def read(file: Path, on_gpu: Mapping[str, Mapping[int, Sequence[float]]] | None = None) -> Measured:
    """Read a file of bench/cpu_accuracy.py; no arms if it does not exist.

    Args:
        file: The file.
        on_gpu: Accuracies in percent that the same training reached on a GPU, by kind and number of epochs.
    """
    lines: list[Line] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    threads = max((line.get("threads", 2) for line in lines), default=2)
    found: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        match = ARM.fullmatch(line["arm"])
        kind = " ".join(filter(None, (match[1], match[3]))) if match else ""
        if match and kind in NAMES and line.get("threads", 2) == threads:
            found.setdefault((kind, int(match[2])), []).append(line)
    shared = any(run.get("load_after", 0) > threads + 0.5 for runs in found.values() for run in runs)
    scored = {key: [run for run in runs if run["accuracy"] is not None] for key, runs in found.items()}
    known = {run["steps"] / epochs for (_, epochs), runs in scored.items() for run in runs if "steps" in run}
    arms, timed = [], dict[str, list[float]]()  # minutes of an epoch
    for (kind, epochs), runs in found.items():
        minutes = [_minutes(run, threads if shared else 0) for run in runs]
        if finished := scored[kind, epochs]:
            times = [time for time, run in zip(minutes, runs, strict=True) if run["accuracy"] is not None]
            processes = [run["process"] / 60 for run in finished if "process" in run]
            process = statistics.mean(processes) if processes else None
            arms.append(Arm(kind, epochs, tuple(100 * run["accuracy"] for run in finished), tuple(times), process))
            continue
        each = [run.get("steps_per_epoch", max(known, default=0.0)) for run in runs]
        timed.setdefault(kind, []).extend(
            time / run["steps"] * steps
            for time, run, steps in zip(minutes, runs, each, strict=True)
            if run.get("steps") and steps
        )
    own = {key for key, runs in scored.items() if not runs}
    elsewhere = {(kind, epochs) for kind, budgets in (on_gpu or {}).items() for epochs in budgets}
    for kind, epochs in (own | elsewhere) - {(arm.kind, arm.epochs) for arm in arms}:
        if times := [epochs * each for each in timed.get(kind, [])]:
            accuracies = tuple((on_gpu or {}).get(kind, {}).get(epochs, ()))
            arms.append(Arm(kind, epochs, accuracies, tuple(times), None, bool(accuracies)))
    order, processor = list(NAMES), next((line["cpu"] for line in lines if "cpu" in line), "")
    return Measured(
        tuple(sorted(arms, key=lambda arm: (order.index(arm.kind), arm.epochs))), threads, shared, processor
    )


def _minutes(run: Line, threads: int) -> float:
    """Minutes of the steps that were taken; if `threads` is not 0, of the processor time on each of these cores."""
    return (run["processor_seconds"] / threads if threads else run["seconds"]) / 60


class Rivals(NamedTuple):
    """The shortest dense trainings that reach an accuracy; `float32` has the minutes of the epochs of `bf16`."""

    bf16: Arm | None
    float32: float | None


class Comparison(NamedTuple):
    """The shortest trainings that reach `target` percent."""

    target: int
    ours: Arm
    bf16: Arm | None
    float32: float | None


def compare(measured: Measured) -> Comparison | None:
    """Compare times to the highest whole percentage that our arms and dense bf16 reach.

    `None` if no sparse arm has an accuracy.
    """
    ours, dense = (
        [arm for arm in measured.of(*kinds) if arm.accuracies] for kinds in (("sparse", "sparse bf16"), ("bf16",))
    )
    if not ours:
        return None
    best = min(max(arm.accuracy or 0.0 for arm in arms) for arms in (ours, dense) if arms)
    target = math.floor(best + 1e-9)  # a mean of percentages may lie below one by rounding
    first = _shortest(ours, target)
    assert first is not None
    return Comparison(target, first, *rivals(measured, target))


def rivals(measured: Measured, accuracy: float) -> Rivals:
    """The dense trainings to compare with; float32 is taken to need as many epochs as bf16."""
    bf16 = _shortest(measured.of("bf16"), accuracy)
    full = measured.of("float32")
    if bf16 is None or not full:
        return Rivals(bf16, None)
    same = [arm for arm in full if arm.epochs == bf16.epochs]
    return Rivals(bf16, same[0].minutes if same else bf16.epochs * full[0].minutes / full[0].epochs)


def _shortest(arms: Sequence[Arm], accuracy: float) -> Arm | None:
    reaching = [arm for arm in arms if (arm.accuracy or 0.0) >= accuracy]
    return min(reaching, key=lambda arm: arm.minutes, default=None)


def table(measured: Measured) -> str:
    """Accuracy and minutes of the sparse arms and of the dense ones that they are compared with, and factors."""
    found = compare(measured)
    if found is None:
        return "Not measured."
    columns = [name for name in ("float32", "bf16") if getattr(found, name) is not None]
    sparse = measured.of("sparse", "sparse bf16")
    compared = [rivals(measured, arm.accuracy).bf16 for arm in sparse if arm.accuracy is not None]
    epochs = {arm.epochs for arm in compared if arm is not None}
    body = []
    for arm in measured.arms:
        if arm.kind in ("bf16", "float32") and epochs and arm.epochs not in epochs:
            continue
        spread = f" ± {statistics.stdev(arm.accuracies):.1f}" if len(arm.accuracies) > 1 else ""
        told = "not scored" if arm.accuracy is None else f"{arm.accuracy:.1f}{spread}"
        process = "" if arm.process is None else f"{arm.process:.1f}"
        cells = [
            NAMES[arm.kind],
            str(arm.epochs),
            told,
            str(len(arm.accuracies) or ""),
            f"{arm.minutes:.1f}",
            process,
        ]
        dense = Rivals(None, None) if arm.accuracy is None else rivals(measured, arm.accuracy)
        minutes = {"float32": dense.float32, "bf16": dense.bf16 and dense.bf16.minutes}
        factors = (minutes[name] for name in columns)
        body.append([*cells, *("" if each is None else f"{each / arm.minutes:.1f} ×" for each in factors)])
    head = ["training", "epochs", "accuracy, %", "runs", "minutes of steps", "of the whole process"]
    head += [f"dense {name} takes" for name in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def short_table(measured: Measured) -> str:
    """The sparse arms that were scored, and the minutes of the dense trainings that they are compared with."""
    ours = [arm for arm in measured.of("sparse", "sparse bf16") if arm.accuracy is not None]
    kinds = {arm.kind for arm in ours}
    body = []
    for arm in ours:
        spread = f" ± {statistics.stdev(arm.accuracies):.1f}" if len(arm.accuracies) > 1 else ""
        dense = rivals(measured, arm.accuracy or 0.0)
        minutes = (dense.bf16 and dense.bf16.minutes, dense.float32)
        times = ["" if each is None else f"{each:.1f} ({each / arm.minutes:.1f} ×)" for each in minutes]
        runs = f"{len(arm.accuracies)} run{'s' * (len(arm.accuracies) > 1)}"
        name = f"{arm.epochs} epochs, {runs}" + f", {NAMES[arm.kind]}" * (len(kinds) > 1)
        body.append([name, f"{arm.accuracy:.1f}{spread}", f"{arm.minutes:.1f}", *times])
    first = NAMES[kinds.pop()] if len(kinds) == 1 else ""
    head = [first, "accuracy, %", "minutes of steps", "dense bf16, minutes", "dense float32, minutes"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def finding(measured: Measured) -> str:
    """`86 % in 11 minutes of steps on two CPU cores; dense takes 25 (bf16) and 44 (float32)`."""
    found = compare(measured)
    if found is None:
        return ""
    minutes = f"{found.ours.minutes:.{0 if found.ours.minutes >= 9.95 else 1}f}"
    told = f"{found.target} % in {minutes} minutes of steps on {measured.cores}"
    dense = {"bf16": found.bf16.minutes if found.bf16 else None, "float32": found.float32}
    times = [f"{minutes:.0f} ({name})" for name, minutes in dense.items() if minutes is not None]
    return f"{told}; dense takes {' and '.join(times)}" if times else told


def explanation(measured: Measured) -> str:
    """How to read the table, in sentences."""
    found = compare(measured)
    if found is None:
        return ""
    clock = (
        "Other programs used the cores, so minutes of steps are processor time divided by the number of cores."
        if measured.shared
        else "Minutes are wall time."
    )
    ratios = (
        "The last columns say how many times as long dense training takes to at least the accuracy of the row, in "
        "minutes of steps; of all dense trainings, the shortest that ends there counts."
    )
    told = [
        *([f"Processor: {measured.processor}."] if measured.processor else []),
        *([ratios] if found.bf16 else []),
        clock,
    ]
    if any(arm.on_gpu for arm in measured.arms):
        others = " and SET-ITOP were" if measured.of("published", "published bf16") else " was"
        told.append(
            f"Dense training{others} stopped after some steps: the time is that of a step times the number of steps, "
            "and the accuracy is that of the same training on a GPU, in bf16."
        )
    elif found.float32 is not None and not any(arm.accuracies for arm in measured.of("float32")):
        told.append(
            "Dense float32 was stopped after some steps: its time is that of a step times the number of steps, and "
            "it is taken to need as many epochs as bf16."
        )
    return " ".join(told)
