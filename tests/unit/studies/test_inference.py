"""Welch's comparison and the test of equivalence against scipy's t-tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from equipoise.studies.inference import welch

SIDES = st.tuples(st.integers(0, 2**32 - 1), st.integers(2, 7), st.integers(2, 7), st.floats(0.1, 10))


def sides(seed: int, n: int, m: int, ratio: float) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    return rng.normal(0.3, 1, n).tolist(), rng.normal(0, ratio, m).tolist()


@settings(deadline=None)  # the first call imports scipy
@given(SIDES, st.floats(0.5, 0.99))
def test_the_difference_is_that_of_scipy(drawn: tuple[int, int, int, float], confidence: float) -> None:
    first, second = sides(*drawn)
    found, expected = welch(first, second), ttest_ind(first, second, equal_var=False)
    assert found is not None
    assert found.difference == pytest.approx(np.mean(first) - np.mean(second))
    assert found.freedom == pytest.approx(expected.df)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-8)
    interval = expected.confidence_interval(confidence)
    assert found.interval(confidence) == pytest.approx((interval.low, interval.high))


@settings(deadline=None)
@given(SIDES, st.floats(0.1, 3))
def test_equivalence_is_two_one_sided_tests(drawn: tuple[int, int, int, float], margin: float) -> None:
    first, second = sides(*drawn)
    found = welch(first, second)
    assert found is not None
    above = ttest_ind(np.add(first, margin), second, equal_var=False, alternative="greater").pvalue
    below = ttest_ind(np.subtract(first, margin), second, equal_var=False, alternative="less").pvalue
    assert found.is_equivalent(margin) == pytest.approx(max(above, below), rel=1e-6, abs=1e-12)
    assert found.exceeds(-margin) == pytest.approx(above, rel=1e-6, abs=1e-12)


def test_without_two_values_that_scatter_there_is_no_comparison() -> None:
    assert welch([1.0], [0.0, 0.1]) is None
    assert welch([0.5, 0.5], [0.4, 0.4]) is None
    assert welch([math.inf, 1.0], [0.0, 0.1]) is None
    assert welch([], []) is None
