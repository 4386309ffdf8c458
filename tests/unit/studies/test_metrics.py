"""Metrics against formulas written out by other means."""

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.studies.metrics import METRICS
from equipoise.studies.results import Question, Result
from study_helpers import epoch, result

SHARES = st.floats(0, 1, allow_subnormal=False)


def metric(name: str, found: Result, **asked: Any) -> Any:
    return METRICS[name](found, Question(metric=name, **asked))


@given(st.lists(SHARES, min_size=5, max_size=20))
def test_stability_is_the_deviation_about_the_line_of_each_window(values: list[float]) -> None:
    deviations = []
    for start in range(len(values) - 4):
        window = np.asarray(values[start : start + 5])
        rest = window - np.polyval(np.polyfit(range(5), window, 1), range(5))
        deviations.append(math.sqrt(float(rest @ rest) / 3))
    assert metric("stability", result("a", 0, values)) == pytest.approx(np.mean(deviations), abs=1e-9)


def test_the_jump_when_the_learning_rate_falls_is_not_noise() -> None:
    flat = [0.6] * 6 + [0.8] * 6
    rates = [0.1] * 6 + [0.01] * 6
    epochs = tuple(epoch(i, a, learning_rate=lr) for i, (a, lr) in enumerate(zip(flat, rates, strict=True), 1))
    assert metric("stability", Result("a", 0, epochs)) == pytest.approx(0, abs=1e-12)
    unknown = tuple(replace(e, learning_rate=None) for e in epochs)
    assert metric("stability", Result("a", 0, unknown)) > 0.01
    smooth = tuple(replace(e, learning_rate=0.9**i) for i, e in enumerate(unknown))
    assert metric("stability", Result("a", 0, smooth)) == metric("stability", Result("a", 0, unknown))
    assert metric("stability", Result("a", 0, epochs[4:8])) is None


@given(st.lists(st.floats(0.4, 0.6), min_size=5, max_size=12), st.floats(-0.03, 0.03))
def test_learning_steadily_is_not_unstable(values: list[float], slope: float) -> None:
    tilted = [value + slope * i for i, value in enumerate(values)]
    assert metric("stability", result("a", 0, tilted)) == pytest.approx(
        metric("stability", result("a", 0, values)), abs=1e-9
    )


def test_stability_needs_a_window_and_ends_at_the_given_epoch() -> None:
    quiet_then_loud = result("a", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.1, 0.9])
    assert metric("stability", quiet_then_loud, at=5) == pytest.approx(0, abs=1e-12)
    assert metric("stability", quiet_then_loud) > 0.01
    assert metric("stability", quiet_then_loud, at=4) is None


@given(st.lists(SHARES, min_size=5, max_size=12), st.integers(5, 12))
def test_window_accuracy_is_the_mean_of_five_epochs(values: list[float], at: int) -> None:
    found = result("a", 0, values)
    assert metric("window-accuracy", found) == pytest.approx(np.mean(values[-5:]))
    expected = pytest.approx(np.convolve(values, np.ones(5) / 5, "valid")[at - 5]) if at <= len(values) else None
    assert metric("window-accuracy", found, at=at) == expected
    gap = replace(found, epochs=tuple(e for e in found.epochs if e.epoch != 4))
    assert metric("window-accuracy", gap, at=5) is None


def test_a_missing_epoch_is_not_ignored() -> None:
    whole = result("a", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9])
    gap = replace(whole, epochs=tuple(e for e in whole.epochs if e.epoch != 2))
    assert metric("mean-accuracy", whole, at=3) == pytest.approx(0.2)
    assert metric("mean-accuracy", gap, at=3) is None
    assert metric("mean-accuracy", gap) is None
    # of the windows 1-5, 2-6, 3-7 only the last has all of its epochs
    assert metric("stability", gap) == pytest.approx(metric("stability", replace(whole, epochs=whole.epochs[2:])))


@given(st.lists(SHARES, min_size=1, max_size=15), SHARES)
def test_epochs_to_is_the_first_whose_median_of_five_reaches(values: list[float], threshold: float) -> None:
    medians = [statistics.median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
    expected = next((i for i, median in enumerate(medians, 1) if median >= threshold), math.inf)
    assert metric("epochs-to", result("a", 0, values), threshold=threshold) == expected


def test_a_lucky_epoch_reaches_nothing() -> None:
    assert metric("epochs-to", result("a", 0, [0.1, 0.1, 0.9, 0.1, 0.1, 0.2]), threshold=0.5) == math.inf
    assert metric("epochs-to", result("a", 0, [0.1] * 4 + [0.5] * 6), threshold=0.5) == 5


def test_accuracy_is_that_of_the_given_epoch() -> None:
    found = result(
        "a", 0, [0.1, 0.2, 0.3], robust={"plain": {"clean": 0.7, "robust": 0.4}}, measured={"variance": 3.0}
    )
    assert metric("accuracy", found) == 0.3
    assert metric("accuracy", found, at=2) == 0.2
    assert metric("accuracy", found, at=4) is None
    assert metric("accuracy", found, score="ema") is None
    assert metric("mean-accuracy", found) == pytest.approx(0.2)
    assert metric("mean-accuracy", found, at=2) == pytest.approx(0.15)
    assert metric("mean-accuracy", found, at=4) is None
    assert metric("mean-accuracy", found, score="ema") is None
    assert (metric("clean", found), metric("robust", found), metric("variance", found)) == (0.7, 0.4, 3.0)
    assert metric("correlation", found) is None
    assert metric("epochs-to", found) is None
    assert set(METRICS.describe().values()) & {""} == set()
