"""What becomes of a claim: the comparison of two arms, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.studies.compare import Spread, paired_p, spread, values_of
from equipoise.studies.metrics import LOWER_IS_BETTER, MEASURED, METRICS
from equipoise.studies.results import Claim, Result, Study

LEVEL = 0.05  # below which p tells a difference from chance


@dataclass(frozen=True)
class Verdict:
    """What became of a claim. gain: how much better, seed by seed, in the metric's own unit; positive as claimed.

    seeds: how many the word is about, with those that diverged.
    """

    word: Literal["holds", "holds in part", "does not hold", "not run"]
    why: str = ""
    seeds: int = 0
    better: Spread | None = None
    than: Spread | None = None
    gain: Spread | None = None
    p: float | None = None
    reduction: float | None = None


def surely(verdicts: Iterable[Verdict]) -> int:
    """How many hold by a gain that is told from chance: with p < 0.05, one seed never."""
    gains = [v for v in verdicts if v.word == "holds" and v.gain is not None and v.gain.mean > 0]
    return sum(v.p is not None and v.p < LEVEL for v in gains)


@dataclass(frozen=True)
class Side:
    """An arm of a claim: its metric by seed, the seeds that diverged before it could be taken, the stuck ones."""

    arm: str
    values: dict[int, float]
    lost: tuple[int, ...]
    stuck: tuple[int, ...]

    def remarks(self, seeds: Sequence[int]) -> Iterator[str]:
        """What is to be known of its runs with these seeds."""
        for what, some in (("diverged", self.lost), ("learned nothing", self.stuck)):
            if of := [str(seed) for seed in some if seed in seeds]:
                yield f"{self.arm} {what} (seed {', '.join(of)})"


def judge(study: Study, claim: Claim) -> Verdict:
    """`holds` where every seed agrees with the claim, `holds in part` where only the mean over seeds does.

    Only seeds that both arms have count, each paired with itself; p is that of the paired t-test. A run that diverged
    before the epoch in question is worse than any that did not; the numbers are of the other seeds. With a margin, a
    difference agrees that is not worse by more than that.
    """
    if claim.metric not in METRICS:
        return Verdict("not run", f"no metric is called {claim.metric}")
    sides = []
    for arm in (claim.better, claim.than):
        if not study.results.get(arm) and not study.diverged.get(arm):
            return Verdict("not run", f"{arm} has no finished seed")
        sides.append(_side(study, claim, arm))
        if not sides[-1].values:
            return Verdict("not run", f"{arm} has no {claim.metric}{_where(claim)}")
    seeds = sorted(set(sides[0].values) & set(sides[1].values))
    if not seeds:
        return Verdict("not run", f"{claim.better} and {claim.than} have no seed in common")
    return _compare(claim, seeds, *sides)


def _side(study: Study, claim: Claim, arm: str) -> Side:
    question = (claim.metric, claim.at, claim.score, claim.threshold)
    diverged = study.diverged.get(arm, ())
    until = [result for result in diverged if _lasted(result, claim.at)]
    values = values_of(study.results.get(arm, ()), *question) | values_of(until, *question)
    # what is measured on final weights says nothing about a run that has none
    lost = () if claim.metric in MEASURED else tuple(r.seed for r in diverged if r.seed not in values)
    worst = math.inf if claim.metric in LOWER_IS_BETTER else -math.inf
    stuck = tuple(result.seed for result in study.results.get(arm, ()) if result.stuck)
    return Side(arm, values | dict.fromkeys(lost, worst), lost, stuck)


def _lasted(diverged: Result, at: int | None) -> bool:
    return at is not None and bool(diverged.epochs) and diverged.epochs[-1].epoch >= at


def _compare(claim: Claim, seeds: Sequence[int], first: Side, second: Side) -> Verdict:
    lower = claim.metric in LOWER_IS_BETTER
    gains = {}
    for seed in seeds:
        a, b = first.values[seed], second.values[seed]
        gains[seed] = 0.0 if a == b else b - a if lower else a - b
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


def _where(claim: Claim) -> str:
    where = "" if claim.at is None else f" at epoch {claim.at}"
    if claim.metric == "epochs-to" and claim.threshold is None:
        where += " without a threshold"
    return where if claim.score == "plain" else f"{where} ({claim.score})"


def reduction(better: Sequence[float], than: Sequence[float]) -> float | None:
    """By how many percent the first is smaller, 100·(1 - better/than), mean of pairs; None if one never does."""
    pairs = list(zip(better, than, strict=True))
    if not pairs or any(not math.isfinite(a) or not math.isfinite(b) or b == 0 for a, b in pairs):
        return None
    return float(np.mean([100 * (1 - a / b) for a, b in pairs]))
