"""Verdicts on claims: comparisons of two arms over all of their runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.studies.compare import Spread, spread, values_of
from equipoise.studies.inference import LEVEL, Effect, welch
from equipoise.studies.metrics import IN_PERCENT, LOWER_IS_BETTER, MEASURED, METRICS
from equipoise.studies.results import Claim, Result, Study

FEWEST = 3  # runs of an arm, below which a comparison is inconclusive
Word = Literal["supported", "not supported", "contradicted", "inconclusive", "not tested"]
EQUIVALENT = {
    **dict.fromkeys(IN_PERCENT, 0.005),
    "epochs-to": 1.0,
    "correlation": 0.05,
    "correlation-everywhere": 0.05,
}
"""Largest difference, by metric, that counts as none: 0.5 points of accuracy, one epoch."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        word: `supported`: the difference has the claimed sign and p < 0.05. `contradicted`: it has the other sign and
            p < 0.05. `not supported`: a difference as large as `EQUIVALENT` is excluded (TOST, p < 0.05).
            `inconclusive`: none of these, or fewer than three runs of an arm. `not tested`: an arm has no run.
        why: The reason, or remarks about runs that diverged or learned nothing.
        better: The metric of the arm that is said to be better.
        than: The metric of the other arm.
        gain: The difference of the means; positive if it agrees with the claim. `None` if a value is not finite.
        effect: The same difference with its uncertainty; `None` below two runs of an arm.
    """

    word: Word
    why: str = ""
    better: Spread | None = None
    than: Spread | None = None
    gain: float | None = None
    effect: Effect | None = None


@dataclass(frozen=True)
class Side:
    """One arm of a claim, with the runs of all studies that have it.

    Attributes:
        values: The metric of each run.
        lost: Names of the runs that diverged before the metric could be taken.
        stuck: Names of the runs that learned nothing.
    """

    arm: str
    values: tuple[float, ...]
    lost: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()

    def __add__(self, other: Side) -> Side:
        return Side(self.arm, self.values + other.values, self.lost + other.lost, self.stuck + other.stuck)

    def remarks(self) -> Iterator[str]:
        """Name the runs that diverged or learned nothing, and count those that never reached a threshold."""
        for what, runs in (("diverged", self.lost), ("learned nothing", self.stuck)):
            if runs:
                yield f"{self.arm} {what} ({', '.join(runs)})"
        if never := sum(not math.isfinite(value) for value in self.values):
            yield f"{self.arm} never got there in {never} of {len(self.values)} runs"


def judge(study: Study, claim: Claim) -> Verdict:
    """Compare the two arms of a claim over all of their runs."""
    return judge_pooled([(study, claim)])


def judge_pooled(sources: Sequence[tuple[Study, Claim]]) -> Verdict:
    """Compare arms that several studies have run; the claims differ in the names of the arms only."""
    claim = sources[0][1]
    if claim.metric not in METRICS:
        return Verdict("not tested", f"no metric is called {claim.metric}")
    sides = []
    for pick in (lambda claim: claim.better, lambda claim: claim.than):
        found = [_side(study, claim, pick(claim)) for study, claim in sources]
        whole = found[0]
        for side in found[1:]:
            whole += side
        if not whole.values and not whole.lost:
            ran = any(study.results.get(pick(claim)) for study, claim in sources)
            return Verdict("not tested", f"{whole.arm} has no {_metric_in_words(claim) if ran else 'finished seed'}")
        sides.append(whole)
    return _compare(claim, *sides)


def _side(study: Study, claim: Claim, arm: str) -> Side:
    finished, diverged = study.results.get(arm, ()), study.diverged.get(arm, ())
    known = [*finished, *(run for run in diverged if _lasted(run, claim.at))]
    values = values_of(known, claim)
    # a metric of the final weights is unknown, not bad, for a run that has none
    lost = () if claim.metric in MEASURED else tuple(f"seed {run.seed}" for run in diverged if run.seed not in values)
    return Side(arm, tuple(values.values()), lost, tuple(f"seed {run.seed}" for run in finished if run.stuck))


def _lasted(diverged: Result, at: int | None) -> bool:
    """Whether a run diverged only after the epoch in question."""
    return at is not None and bool(diverged.epochs) and diverged.epochs[-1].epoch >= at


def _compare(claim: Claim, first: Side, second: Side) -> Verdict:
    high, low = (second, first) if claim.metric in LOWER_IS_BETTER else (first, second)
    effect = welch(high.values, low.values)
    finite = high.values and low.values and all(map(math.isfinite, (*high.values, *low.values)))
    gain = sum(high.values) / len(high.values) - sum(low.values) / len(low.values) if finite else None
    few = min(len(first.values), len(second.values)) < FEWEST
    word: Word = "inconclusive"
    if effect is not None and not few and not first.lost and not second.lost:
        word = _word(effect, claim.margin, EQUIVALENT.get(claim.metric))
    remarks = [*first.remarks(), *second.remarks(), *([f"fewer than {FEWEST} runs of an arm"] if few else [])]
    return Verdict(word, "; ".join(remarks), spread(first.values), spread(second.values), gain, effect)


def _word(effect: Effect, margin: float, equivalent: float | None) -> Word:
    """Judge a claim of a gain or, with a margin, a claim that nothing is lost."""
    low, high = effect.interval()
    if margin:
        return (
            "supported" if effect.exceeds(-margin) < LEVEL else "contradicted" if high < -margin else "inconclusive"
        )
    if low > 0:
        return "supported"
    if high < 0:
        return "contradicted"
    within = equivalent is not None and effect.is_equivalent(equivalent) < LEVEL
    return "not supported" if within else "inconclusive"


def _metric_in_words(claim: Claim) -> str:
    words = claim.metric if claim.at is None else f"{claim.metric} at epoch {claim.at}"
    if claim.metric == "epochs-to" and claim.threshold is None:
        words += " without a threshold"
    return words if claim.score == "plain" else f"{words} ({claim.score})"
