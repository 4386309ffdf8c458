"""Verdicts on claims: comparisons of two arms, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.studies.compare import Spread, paired_p, spread, values_of
from equipoise.studies.metrics import LOWER_IS_BETTER, MEASURED, METRICS
from equipoise.studies.results import Claim, Result, Study

LEVEL = 0.05  # of significance


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        word: The verdict.
        why: The reason for `not run`, or remarks about runs that diverged or learned nothing.
        seeds: Number of seeds that the verdict is about, including those that diverged.
        better: The metric of the arm that is said to be better.
        than: The metric of the other arm.
        gain: The difference seed by seed, in the unit of the metric; positive if it agrees with the claim.
        p: Of the paired t-test; `None` below two seeds.
        reduction: By how many percent the first arm is lower, for metrics of which lower is better.
    """

    word: Literal["holds", "holds in part", "does not hold", "not run"]
    why: str = ""
    seeds: int = 0
    better: Spread | None = None
    than: Spread | None = None
    gain: Spread | None = None
    p: float | None = None
    reduction: float | None = None


def count_significant(verdicts: Iterable[Verdict]) -> int:
    """Count the claims that hold by a gain with p < 0.05. A single seed never counts."""
    gains = [v for v in verdicts if v.word == "holds" and v.gain is not None and v.gain.mean > 0]
    return sum(v.p is not None and v.p < LEVEL for v in gains)


@dataclass(frozen=True)
class Side:
    """One arm of a claim.

    Attributes:
        values: The metric by seed; for `lost` seeds the worst possible value.
        lost: Seeds that diverged before the metric could be taken.
        stuck: Seeds that learned nothing.
    """

    arm: str
    values: dict[int, float]
    lost: tuple[int, ...]
    stuck: tuple[int, ...]

    def remarks(self, seeds: Sequence[int]) -> Iterator[str]:
        """Name the runs with these seeds that diverged or learned nothing."""
        for what, some in (("diverged", self.lost), ("learned nothing", self.stuck)):
            if of := [str(seed) for seed in some if seed in seeds]:
                yield f"{self.arm} {what} (seed {', '.join(of)})"


def judge(study: Study, claim: Claim) -> Verdict:
    """Compare the two arms of a claim over the seeds that both have.

    A claim `holds` if every seed agrees with it and `holds in part` if only the mean over seeds does. A seed agrees
    if the difference has the claimed sign or, with a margin, if it is not worse by more than the margin. A run that
    diverged before the epoch in question is worse than any that did not; the numbers are those of the other seeds.
    """
    if claim.metric not in METRICS:
        return Verdict("not run", f"no metric is called {claim.metric}")
    sides = []
    for arm in (claim.better, claim.than):
        if not study.results.get(arm) and not study.diverged.get(arm):
            return Verdict("not run", f"{arm} has no finished seed")
        sides.append(_side(study, claim, arm))
        if not sides[-1].values:
            return Verdict("not run", f"{arm} has no {_metric_in_words(claim)}")
    seeds = sorted(set(sides[0].values) & set(sides[1].values))
    if not seeds:
        return Verdict("not run", f"{claim.better} and {claim.than} have no seed in common")
    return _compare(claim, seeds, *sides)


def _side(study: Study, claim: Claim, arm: str) -> Side:
    finished, diverged = study.results.get(arm, ()), study.diverged.get(arm, ())
    values = values_of([*finished, *(run for run in diverged if _lasted(run, claim.at))], claim)
    # a metric of the final weights is unknown, not bad, for a run that has none
    lost = () if claim.metric in MEASURED else tuple(run.seed for run in diverged if run.seed not in values)
    worst = math.inf if claim.metric in LOWER_IS_BETTER else -math.inf
    return Side(arm, values | dict.fromkeys(lost, worst), lost, tuple(run.seed for run in finished if run.stuck))


def _lasted(diverged: Result, at: int | None) -> bool:
    """Whether a run diverged only after the epoch in question."""
    return at is not None and bool(diverged.epochs) and diverged.epochs[-1].epoch >= at


def _compare(claim: Claim, seeds: Sequence[int], first: Side, second: Side) -> Verdict:
    lower = claim.metric in LOWER_IS_BETTER
    gains = {}
    for seed in seeds:
        a, b = first.values[seed], second.values[seed]
        gains[seed] = 0.0 if a == b else b - a if lower else a - b  # inf - inf is nan
    sound = [seed for seed in seeds if seed not in first.lost + second.lost]
    better, than = ([side.values[seed] for seed in sound] for side in (first, second))
    return Verdict(
        _word([*gains.values()], claim.margin),
        why="; ".join([*first.remarks(seeds), *second.remarks(seeds)]),
        seeds=len(seeds),
        better=spread(better),
        than=spread(than),
        gain=spread([gains[seed] for seed in sound]),
        p=paired_p(better, than),
        reduction=reduction(better, than) if lower else None,
    )


def _word(gains: Sequence[float], margin: float) -> Literal["holds", "holds in part", "does not hold"]:
    def agrees(gain: float) -> bool:
        return gain >= -margin * (1 + 1e-9) if margin else gain > 0

    if all(map(agrees, gains)):
        return "holds"
    return "holds in part" if agrees(sum(gains) / len(gains)) else "does not hold"


def _metric_in_words(claim: Claim) -> str:
    words = claim.metric if claim.at is None else f"{claim.metric} at epoch {claim.at}"
    if claim.metric == "epochs-to" and claim.threshold is None:
        words += " without a threshold"
    return words if claim.score == "plain" else f"{words} ({claim.score})"


def reduction(better: Sequence[float], than: Sequence[float]) -> float | None:
    """Return by how many percent `better` is lower, 100·(1 - better/than), as a mean over pairs.

    `None` if a value is infinite or the divisor is zero.
    """
    pairs = list(zip(better, than, strict=True))
    if not pairs or any(not math.isfinite(a) or not math.isfinite(b) or b == 0 for a, b in pairs):
        return None
    return float(np.mean([100 * (1 - a / b) for a, b in pairs]))
