"""Compare arms at equal epochs, equal gradient evaluations and equal time, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from equipoise.studies.metrics import METRICS
from equipoise.studies.results import Epoch, Question, Result, Study

Axis = Literal["epochs", "evaluations", "seconds"]
AXES: tuple[Axis, ...] = ("epochs", "evaluations", "seconds")
TOLERANCE = 0.1  # relative; costs that differ by less count as equal, because clocks differ as much between runs


# Cost


def gradient_evaluations(passes: Mapping[str, float]) -> float:
    """Convert passes to plain passes over a batch: (forward + 2·backward + 2·attack) / 3.

    A backward pass to the weights costs two forward passes. An attack step, forward and then backward to the images
    alone, costs two as well.
    """
    forward, backward, attack = (passes.get(kind, 0.0) for kind in ("forward", "backward", "attack"))
    return (forward + 2 * backward + 2 * attack) / 3


def position(epoch: Epoch, axis: Axis) -> float | None:
    """Return the position of an epoch's end on an axis; `None` if unknown.

    Evaluations are in passes over the training images, so that an epoch of SGD counts 1 at any batch size.
    """
    if axis == "epochs":
        return float(epoch.epoch)
    if axis == "seconds":
        return epoch.seconds
    steps_per_epoch = epoch.step / epoch.epoch
    return gradient_evaluations(epoch.passes) / steps_per_epoch if epoch.passes else None


def cost_per_epoch(result: Result) -> float | None:
    """Return the gradient evaluations of an epoch relative to SGD, averaged over the run."""
    total = position(result.epochs[-1], "evaluations")
    return None if total is None else total / result.epochs[-1].epoch


# Seeds


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    Attributes:
        mean: Over the finite values; infinity if there is none.
        std: With n - 1 degrees of freedom; `None` for a single value.
        count: Number of seeds.
        never: Number of seeds whose value is not finite.
    """

    mean: float
    std: float | None
    count: int
    never: int = 0


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and deviation; `None` for no values."""
    if not values:
        return None
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Spread(math.inf, None, len(values), len(values))
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else None
    return Spread(float(np.mean(finite)), std, len(values), len(values) - len(finite))


def values_of(results: Sequence[Result], question: Question) -> dict[int, float]:
    """Return a metric by seed, for the seeds that have it."""
    found = {result.seed: METRICS[question.metric](result, question) for result in results}
    return {seed: value for seed, value in found.items() if value is not None}


def spread_of(results: Sequence[Result], question: Question) -> Spread | None:
    """Return mean and deviation of a metric over the seeds that have it."""
    return spread([*values_of(results, question).values()])


# Equal cost


class Reached(NamedTuple):
    """An accuracy at some cost.

    Attributes:
        accuracy: The accuracy.
        share: The share of the run's schedule at that point; 1 at its end.
    """

    accuracy: float
    share: float

    def is_comparable(self, other: Reached) -> bool:
        """Whether both are about as far in their schedules; else the learning rates differ."""
        return abs(self.share - other.share) <= TOLERANCE


def budgets(study: Study, axis: Axis) -> dict[int, float]:
    """Return the cost at which arms are compared, by seed: the total of the cheapest arm with that seed."""
    found: dict[int, float] = {}
    for arm, results in study.results.items():
        for result in results if arm not in study.budgets else ():
            spent = position(result.epochs[-1], axis)
            if spent is not None:
                found[result.seed] = min(spent, found.get(result.seed, math.inf))
    return found


def at_equal(study: Study, axis: Axis, score: str = "plain") -> dict[str, dict[int, Reached]]:
    """Return accuracy by arm and seed at the seed's budget.

    A run of the arm that ends within 10 % of the budget is preferred, including runs with other numbers of epochs.
    Otherwise the accuracy is that of the epoch that ends nearest to the budget, at most half an epoch beyond it.
    Nothing is interpolated. The half epoch keeps arms of equal cost from losing an epoch to jitter of the clock.
    """
    limits = budgets(study, axis)
    found: dict[str, dict[int, Reached]] = {arm: {} for arm in study.results if arm not in study.budgets}
    for arm, by_seed in found.items():
        shorter = [r for name, base in study.budgets.items() if base == arm for r in study.results.get(name, ())]
        for result in study.results[arm]:
            runs = [result, *(other for other in shorter if other.seed == result.seed)]
            if result.seed in limits and (reached := _reached(runs, axis, limits[result.seed], score)):
                by_seed[result.seed] = reached
    return found


def _reached(runs: Sequence[Result], axis: Axis, budget: float, score: str) -> Reached | None:
    """Return the accuracy of a run that ends at the budget, else that of the first run at its nearest epoch."""
    for run in runs:
        spent = position(run.epochs[-1], axis)
        if spent is not None and abs(spent - budget) <= TOLERANCE * budget and score in run.epochs[-1].scores:
            return Reached(run.epochs[-1].scores[score], 1)
    epoch = _nearest(runs[0], axis, budget)
    if epoch is None or score not in epoch.scores:
        return None
    return Reached(epoch.scores[score], epoch.epoch / runs[0].epochs[-1].epoch)


def _nearest(result: Result, axis: Axis, budget: float) -> Epoch | None:
    nearest, before = None, 0.0
    for epoch in result.epochs:
        spent = position(epoch, axis)
        if spent is None:
            continue
        if before + spent > 2 * budget * (1 + 1e-9):  # more than half of the epoch is beyond the budget
            break
        nearest, before = epoch, spent
    return nearest


# Curves


@dataclass(frozen=True)
class Point:
    """An epoch of an arm: its position on the axes, and a value over seeds."""

    x: Mapping[Axis, float | None]
    y: Spread


def curve(results: Sequence[Result], pick: Callable[[Epoch], float | None]) -> list[Point]:
    """Return a value for the epochs that every seed has, with the mean position on each axis."""
    by_epoch = [{e.epoch: e for e in result.epochs} for result in results]
    shared = sorted(set.intersection(*map(set, by_epoch))) if by_epoch else []
    points = []
    for number in shared:
        epochs = [epochs[number] for epochs in by_epoch]
        values = [y for e in epochs if (y := pick(e)) is not None]
        found = spread(values)
        if found is not None and len(values) == len(epochs):
            points.append(Point({axis: _mean_position(epochs, axis) for axis in AXES}, found))
    return points


def _mean_position(epochs: Sequence[Epoch], axis: Axis) -> float | None:
    known = [x for epoch in epochs if (x := position(epoch, axis)) is not None]
    return float(np.mean(known)) if len(known) == len(epochs) else None
