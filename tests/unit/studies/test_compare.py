"""Comparisons of arms against formulas written out by other means."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.studies.compare import (
    Reached,
    at_equal,
    budgets,
    cost_per_epoch,
    curve,
    gradient_evaluations,
    position,
    spread,
)
from equipoise.studies.results import Result
from study_helpers import epoch, result, study

SHARES = st.floats(0, 1, allow_subnormal=False)


# Cost


def test_passes_count_as_the_paper_counts_them() -> None:
    assert gradient_evaluations({"forward": 7, "backward": 7}) == 7
    # exact AGENT, a batch: g_new, g_old and g̃ with a backward pass each, and a forward one for ĉ
    assert gradient_evaluations({"forward": 4, "backward": 3}) == pytest.approx(10 / 3)
    assert gradient_evaluations({"forward": 1, "backward": 1, "attack": 10}) == pytest.approx((1 + 2 + 20) / 3)


@given(st.integers(1, 50), st.integers(1, 500))
def test_an_epoch_of_sgd_costs_1_at_any_batch_size(number: int, steps: int) -> None:
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


def test_one_seed_has_no_deviation_and_no_seed_has_no_spread() -> None:
    assert spread([0.3]).std is None  # type: ignore[union-attr]
    assert spread([]) is None


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


def test_a_run_that_ends_at_the_budget_is_preferred_to_a_longer_one() -> None:
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


def test_runs_that_are_as_far_in_their_schedules_are_comparable() -> None:
    end, nearly, middle, beyond = Reached(0.8, 1), Reached(0.8, 0.94), Reached(0.5, 0.5), Reached(0.5, 0.55)
    assert end.is_comparable(nearly)
    assert middle.is_comparable(beyond)
    assert not nearly.is_comparable(middle)


def test_a_jitter_of_the_clock_costs_no_epoch() -> None:
    asked = study(result("a", 0, [0.1, 0.2, 0.3]), result("b", 0, [0.1, 0.2, 0.3], slow=1.01))
    assert accuracies(at_equal(asked, "seconds")) == {"a": {0: 0.3}, "b": {0: 0.3}}


def test_a_curve_is_the_mean_over_seeds_at_epochs_that_all_have() -> None:
    results = [result("a", 0, [0.1, 0.2, 0.6]), result("a", 1, [0.3, 0.4], slow=2.0)]
    points = curve(results, lambda e: e.scores.get("plain"))
    assert [(p.x["epochs"], p.x["seconds"]) for p in points] == [(1, 3), (2, 6)]
    assert [p.y.mean for p in points] == pytest.approx([0.2, 0.3])
    assert [p.y.std for p in points] == pytest.approx([math.sqrt(0.02)] * 2)
    assert curve([], lambda e: 0.0) == []
