"""Comparisons of arms against formulas written out by other means."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.studies.compare import (
    Reached,
    at_equal,
    budgets,
    cost_per_epoch,
    curve,
    gradient_evaluations,
    paired_p,
    position,
    spread,
)
from equipoise.studies.metrics import METRICS
from equipoise.studies.results import Question, Result
from study_helpers import epoch, result, study

SHARES = st.floats(0, 1, allow_subnormal=False)


def metric(name: str, found: Result, **asked: Any) -> Any:
    return METRICS[name](found, Question(metric=name, **asked))


# Cost


def test_passes_count_as_the_paper_counts_them() -> None:
    assert gradient_evaluations({"forward": 7, "backward": 7}) == 7
    # exact AGENT, a batch: g_new, g_old and g̃ with a backward pass each, and a forward one for ĉ
    assert gradient_evaluations({"forward": 4, "backward": 3}) == pytest.approx(10 / 3)
    assert gradient_evaluations({"forward": 1, "backward": 1, "attack": 10}) == pytest.approx((1 + 2 + 20) / 3)


@given(st.integers(1, 50), st.integers(1, 500))
def test_an_epoch_of_sgd_costs_one_whatever_the_batch_size(number: int, steps: int) -> None:
    done = number * steps
    found = epoch(number, 0.5, step=done, passes={"forward": done, "backward": done})
    assert position(found, "evaluations") == pytest.approx(number)
    assert position(found, "epochs") == number
    assert position(epoch(number, 0.5, passes={}), "evaluations") is None


def test_cost_of_an_epoch_is_a_multiple_of_sgd() -> None:
    assert cost_per_epoch(result("a", 0, [0.1, 0.2, 0.3], cost=3)) == pytest.approx(3)


# Over seeds


@given(st.lists(SHARES, min_size=2, max_size=9))
def test_spread_is_mean_and_sample_deviation(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    mean = math.fsum(values) / len(values)
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert found.std == pytest.approx(
        math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)), abs=1e-9
    )
    assert found.count == len(values)


def test_one_seed_has_no_deviation_and_none_no_spread() -> None:
    assert spread([0.3]).std is None  # type: ignore[union-attr]
    assert spread([]) is None


def statistic(first: list[float], second: list[float]) -> float:
    d = np.asarray(first) - np.asarray(second)
    return float(d.mean() / (d.std(ddof=1) / math.sqrt(len(d))))


PAIRS = st.tuples(SHARES, SHARES)


@settings(deadline=None)  # the first call imports scipy
@given(st.lists(PAIRS, min_size=2, max_size=3))
def test_p_is_that_of_students_t_in_closed_form(pairs: list[tuple[float, float]]) -> None:
    first, second = map(list, zip(*pairs, strict=True))
    p = paired_p(first, second)
    if np.ptp(np.subtract(first, second)) < 1e-9:
        return
    t = abs(statistic(first, second))
    # Student's t with one degree of freedom is Cauchy's; with two its distribution is algebraic
    expected = 1 - 2 / math.pi * math.atan(t) if len(pairs) == 2 else 1 - t / math.sqrt(2 + t * t)
    assert p == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_there_is_no_p_without_two_pairs_that_differ() -> None:
    assert paired_p([0.5], [0.4]) is None
    assert paired_p([], []) is None
    assert paired_p([0.5, 0.6], [0.4, 0.5]) is None
    assert paired_p([math.inf, 0.6], [0.4, 0.5]) is None


# Metrics


@given(st.lists(SHARES, min_size=5, max_size=20))
def test_stability_is_the_deviation_about_the_line_of_each_window(values: list[float]) -> None:
    deviations = []
    for start in range(len(values) - 4):
        window = np.asarray(values[start : start + 5])
        rest = window - np.polyval(np.polyfit(range(5), window, 1), range(5))
        deviations.append(math.sqrt(float(rest @ rest) / 3))
    assert metric("stability", result("a", 0, values)) == pytest.approx(np.mean(deviations), abs=1e-9)


def test_the_jump_where_the_learning_rate_falls_is_no_noise() -> None:
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


def test_stability_needs_a_window_and_looks_no_further_than_asked() -> None:
    quiet_then_loud = result("a", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.1, 0.9])
    assert metric("stability", quiet_then_loud, at=5) == pytest.approx(0, abs=1e-12)
    assert metric("stability", quiet_then_loud) > 0.01
    assert metric("stability", quiet_then_loud, at=4) is None


def test_a_missing_epoch_is_not_passed_over() -> None:
    whole = result("a", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9])
    gap = replace(whole, epochs=tuple(e for e in whole.epochs if e.epoch != 2))
    assert metric("mean-accuracy", whole, at=3) == pytest.approx(0.2)
    assert metric("mean-accuracy", gap, at=3) is None
    assert metric("mean-accuracy", gap) is None
    # of the windows 1-5, 2-6, 3-7 only the last has all of its epochs
    assert metric("stability", gap) == pytest.approx(metric("stability", replace(whole, epochs=whole.epochs[2:])))


@given(st.lists(SHARES, min_size=1, max_size=15), SHARES)
def test_epochs_to_is_the_first_that_reaches(values: list[float], threshold: float) -> None:
    expected = next((i + 1 for i in range(len(values)) if values[i] >= threshold), math.inf)
    assert metric("epochs-to", result("a", 0, values), threshold=threshold) == expected


def test_accuracy_is_that_of_the_epoch_asked_for() -> None:
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


# Equal cost

POSITIONS = st.lists(st.floats(0.5, 3), min_size=1, max_size=8).map(np.cumsum)


@given(POSITIONS, POSITIONS)
def test_equal_time_is_the_end_or_the_epoch_that_ends_nearest_to_the_cheapest_total(
    one: np.ndarray, other: np.ndarray
) -> None:
    arms = {"one": one, "other": other}
    results = [
        Result(name, 0, tuple(epoch(i, i / 100, seconds=float(x)) for i, x in enumerate(ends, 1)))
        for name, ends in arms.items()
    ]
    found = accuracies(at_equal(study(*results), "seconds"))
    budget = min(one[-1], other[-1])
    for name, ends in arms.items():
        if ends[-1] <= 1.1 * budget - 1e-6:  # its end costs as much
            assert found[name] == {0: len(ends) / 100}
            continue
        if ends[-1] <= 1.1 * budget + 1e-6:
            continue
        distances = np.abs(np.concatenate([[0.0], ends]) - budget)
        first, second = np.sort(distances)[:2]
        if second - first < 1e-6:
            continue  # a tie
        nearest = int(distances.argmin())
        assert found[name] == ({} if nearest == 0 else {0: nearest / 100})


def accuracies(found: dict[str, dict[int, Reached]]) -> dict[str, dict[int, float]]:
    return {arm: {seed: reached.accuracy for seed, reached in by_seed.items()} for arm, by_seed in found.items()}


def test_each_seed_has_its_own_budget_and_axis() -> None:
    sgd = [result("SGD", seed, [0.1, 0.2, 0.3, 0.4]) for seed in (0, 1)]
    agent = [result("AGENT", 0, [0.2, 0.4, 0.6, 0.8], cost=2, slow=4.0), result("AGENT", 1, [0.3, 0.5], cost=2)]
    asked = study(*sgd, *agent)
    assert budgets(asked, "epochs") == {0: 4, 1: 2}
    assert budgets(asked, "evaluations") == {0: 4, 1: 4}
    assert accuracies(at_equal(asked, "epochs")) == {"SGD": {0: 0.4, 1: 0.2}, "AGENT": {0: 0.8, 1: 0.5}}
    assert accuracies(at_equal(asked, "evaluations")) == {"SGD": {0: 0.4, 1: 0.4}, "AGENT": {0: 0.4, 1: 0.5}}
    assert accuracies(at_equal(asked, "seconds"))["AGENT"] == {0: 0.2, 1: 0.5}


def test_a_run_that_ends_at_the_budget_is_taken_before_one_that_is_broken_off() -> None:
    sgd = result("SGD", 0, [0.1, 0.2, 0.3, 0.8])
    agent = result("AGENT", 0, [0.2, 0.4, 0.6, 0.9], cost=2)
    short = result("AGENT, 2 epochs", 0, [0.3, 0.7], cost=2.04)  # 4.08, nearly as much as SGD
    asked = study(sgd, agent, short, budgets={"AGENT, 2 epochs": "AGENT"})
    assert budgets(asked, "evaluations") == {0: 4}
    assert at_equal(asked, "evaluations") == {"SGD": {0: (0.8, 1)}, "AGENT": {0: (0.7, 1)}}
    assert at_equal(asked, "epochs") == {"SGD": {0: (0.8, 1)}, "AGENT": {0: (0.9, 1)}}
    assert at_equal(study(sgd, agent), "evaluations")["AGENT"] == {0: (0.4, 0.5)}
    long = result("AGENT, 3 epochs", 0, [0.3, 0.7, 0.8], cost=2)
    far = study(sgd, agent, long, budgets={"AGENT, 3 epochs": "AGENT"})
    assert at_equal(far, "evaluations")["AGENT"] == {0: (0.4, 0.5)}


def test_what_is_as_far_in_its_schedule_can_be_compared() -> None:
    end, nearly, middle, beyond = Reached(0.8, 1), Reached(0.8, 0.94), Reached(0.5, 0.5), Reached(0.5, 0.55)
    assert end.is_comparable(nearly)
    assert middle.is_comparable(beyond)
    assert not nearly.is_comparable(middle)


def test_a_jitter_of_the_clock_costs_no_epoch() -> None:
    asked = study(result("a", 0, [0.1, 0.2, 0.3]), result("b", 0, [0.1, 0.2, 0.3], slow=1.01))
    assert accuracies(at_equal(asked, "seconds")) == {"a": {0: 0.3}, "b": {0: 0.3}}


def test_a_curve_is_the_mean_over_the_seeds_of_epochs_that_all_have() -> None:
    results = [result("a", 0, [0.1, 0.2, 0.6]), result("a", 1, [0.3, 0.4], slow=2.0)]
    points = curve(results, lambda e: e.scores.get("plain"))
    assert [(p.x["epochs"], p.x["seconds"]) for p in points] == [(1, 3), (2, 6)]
    assert [p.y.mean for p in points] == pytest.approx([0.2, 0.3])
    assert [p.y.std for p in points] == pytest.approx([math.sqrt(0.02)] * 2)
    assert curve([], lambda e: 0.0) == []
