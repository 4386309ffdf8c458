"""Comparing arms fairly: at equal epochs, equal gradient evaluations and equal time, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from equipoise.studies.metrics import METRICS
from equipoise.studies.results import Epoch, Result, Study

Axis = Literal["epochs", "evaluations", "seconds"]
AXES: tuple[Axis, ...] = ("epochs", "evaluations", "seconds")
CLOSE = 0.1  # of a cost that counts as equal: clocks differ by as much from run to run


# What a run has cost


def gradient_evaluations(passes: Mapping[str, float]) -> float:
    """Passes in units of a plain one over a batch: (forward + 2·backward + 2·attack) / 3.

    A backward pass to the weights counts as two forward ones; an attack's pass, forward and then backward to the
    images alone, as two.
    """
    forward, backward, attack = (passes.get(kind, 0.0) for kind in ("forward", "backward", "attack"))
    return (forward + 2 * backward + 2 * attack) / 3


def position(epoch: Epoch, axis: Axis) -> float | None:
    """Where an epoch's end stands on an axis, or None where it is not known.

    evaluations: plain passes over the training images, so that one epoch of SGD counts 1 whatever its batch size.
    """
    if axis == "epochs":
        return float(epoch.epoch)
    if axis == "seconds":
        return epoch.seconds
    steps_an_epoch = epoch.step / epoch.epoch
    return gradient_evaluations(epoch.passes) / steps_an_epoch if epoch.passes else None


def cost_of_epoch(result: Result) -> float | None:
    """Gradient evaluations of an epoch as a multiple of SGD's, on average over the run."""
    total = position(result.epochs[-1], "evaluations")
    return None if total is None else total / result.epochs[-1].epoch


# Over seeds


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over seeds; std is None for a single one.

    never: how many of the seeds have no finite value, and are not in the mean.
    """

    mean: float
    std: float | None
    count: int
    never: int = 0


def spread(values: Sequence[float]) -> Spread | None:
    """None where there is no value."""
    if not values:
        return None
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Spread(math.inf, None, len(values), len(values))
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else None
    return Spread(float(np.mean(finite)), std, len(values), len(values) - len(finite))


def paired_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test; None for fewer than two pairs and where all differences are the same."""
    if len(first) < 2 or not all(map(math.isfinite, [*first, *second])):
        return None
    difference = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if np.ptp(difference) <= 1e-12 * max(1.0, float(np.abs(difference).max())):
        return None
    from scipy.stats import ttest_rel

    return float(ttest_rel(first, second).pvalue)


def values_of(
    results: Sequence[Result],
    metric: str,
    at: int | None = None,
    score: str = "plain",
    threshold: float | None = None,
) -> dict[int, float]:
    """A metric by seed, for the seeds that have it."""
    function = METRICS[metric]
    found = {result.seed: function(result, at, score, threshold) for result in results}
    return {seed: value for seed, value in found.items() if value is not None}


# At equal cost


class Reached(NamedTuple):
    """An accuracy at some cost. share: of the schedule of the run that it is of; 1 where the run ends there."""

    accuracy: float
    share: float

    @property
    def whole(self) -> bool:
        return self.share == 1

    def comparable(self, other: Reached) -> bool:
        """A run in the middle of its schedule says nothing about one at its end."""
        return abs(self.share - other.share) <= CLOSE


def budgets(study: Study, axis: Axis) -> dict[int, float]:
    """What every arm can spend, by seed: as much as the cheapest arm that has the seed spent in all."""
    found: dict[int, float] = {}
    for arm, results in study.results.items():
        for result in results if arm not in study.budgets else ():
            spent = position(result.epochs[-1], axis)
            if spent is not None:
                found[result.seed] = min(spent, found.get(result.seed, math.inf))
    return found


def at_equal(study: Study, axis: Axis, score: str = "plain") -> dict[str, dict[int, Reached]]:
    """Accuracy by arm and seed at the seed's budget: of a run of the arm that ends there, to 10 %, if there is one.

    Else it is that of the epoch that ends nearest to the budget, half an epoch beyond at most: nothing is
    interpolated, and the half epoch keeps arms of equal cost from losing an epoch to the jitter of clocks.
    """
    limits = budgets(study, axis)
    found: dict[str, dict[int, Reached]] = {arm: {} for arm in study.results if arm not in study.budgets}
    for arm, by_seed in found.items():
        for result in study.results[arm]:
            others = [r for name in _with_budgets(study, arm) for r in study.results[name] if r.seed == result.seed]
            reached = _reached(result, others, axis, limits.get(result.seed), score)
            if reached is not None:
                by_seed[result.seed] = reached
    return found


def _with_budgets(study: Study, arm: str) -> list[str]:
    return [name for name, base in study.budgets.items() if base == arm and name in study.results]


def _reached(
    result: Result, others: Sequence[Result], axis: Axis, budget: float | None, score: str
) -> Reached | None:
    if budget is None:
        return None
    for whole in (result, *others):
        spent = position(whole.epochs[-1], axis)
        if spent is not None and abs(spent - budget) <= CLOSE * budget and score in whole.epochs[-1].scores:
            return Reached(whole.epochs[-1].scores[score], 1)
    epoch = _within(result, axis, budget)
    if epoch is None or score not in epoch.scores:
        return None
    return Reached(epoch.scores[score], epoch.epoch / result.epochs[-1].epoch)


def _within(result: Result, axis: Axis, budget: float) -> Epoch | None:
    affordable, before = None, 0.0
    for epoch in result.epochs:
        spent = position(epoch, axis)
        if spent is None:
            continue
        if before + spent > 2 * budget * (1 + 1e-9):  # more than half of the epoch is beyond
            break
        affordable, before = epoch, spent
    return affordable


@dataclass(frozen=True)
class Point:
    """An epoch of an arm: where it stands on the axes, and a value with its deviation over seeds."""

    x: Mapping[Axis, float | None]
    y: Spread


def curve(results: Sequence[Result], pick: Callable[[Epoch], float | None]) -> list[Point]:
    """A value over the epochs that every seed has, with the mean position on each axis."""
    by_epoch = [{e.epoch: e for e in result.epochs} for result in results]
    shared = sorted(set.intersection(*map(set, by_epoch))) if by_epoch else []
    points = []
    for number in shared:
        epochs = [epochs[number] for epochs in by_epoch]
        values = [y for e in epochs if (y := pick(e)) is not None]
        found = spread(values)
        if found is not None and len(values) == len(epochs):
            points.append(Point({axis: _mean([position(e, axis) for e in epochs]) for axis in AXES}, found))
    return points


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None
