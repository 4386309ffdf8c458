"""Welch's comparison of two means, and the test that they are equivalent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05  # of significance


@dataclass(frozen=True)
class Effect:
    """The difference of two means that may have different variances (Welch 1947).

    Attributes:
        difference: First mean minus second mean.
        error: Its standard error.
        freedom: Degrees of freedom after Satterthwaite.
    """

    difference: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided p of the difference."""
        return 2 * self._tail(abs(self.difference))

    def interval(self, confidence: float = 1 - LEVEL) -> tuple[float, float]:
        """Return the two-sided confidence interval of the difference."""
        from scipy.stats import t

        reach = float(t.ppf((1 + confidence) / 2, self.freedom)) * self.error
        return self.difference - reach, self.difference + reach

    def exceeds(self, bound: float) -> float:
        """Return the one-sided p of the hypothesis that the difference is at most `bound`."""
        return self._tail(self.difference - bound)

    def is_equivalent(self, margin: float) -> float:
        """Return the p of two one-sided tests (TOST): small if the difference is within ±margin."""
        return max(self._tail(self.difference + margin), self._tail(margin - self.difference))

    def _tail(self, distance: float) -> float:
        from scipy.stats import t

        return float(t.sf(distance / self.error, self.freedom))


def welch(first: Sequence[float], second: Sequence[float]) -> Effect | None:
    """Compare two means; `None` below two values on a side, for infinite values, or if no value scatters."""
    if min(len(first), len(second)) < 2 or not all(map(math.isfinite, [*first, *second])):
        return None
    parts = [float(np.var(side, ddof=1)) / len(side) for side in (first, second)]
    error = math.sqrt(sum(parts))
    difference = float(np.mean(first) - np.mean(second))
    if error <= 1e-12 * max(1.0, abs(difference)):
        return None
    divisor = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (first, second), strict=True))
    return Effect(difference, error, error**4 / divisor)
