"""Learning rate schedules against values worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import UserError
from equipoise.lr_schedule import SCHEDULES, Constant, Cosine, Piecewise, Schedule


def factors(schedule: Schedule, epochs: int, steps_per_epoch: int) -> list[float]:
    return [schedule.factor(step, epochs, steps_per_epoch) for step in range(epochs * steps_per_epoch)]


def test_constant() -> None:
    assert factors(Constant(), 3, 2) == [1.0] * 6


def test_piecewise_as_in_itop() -> None:
    assert factors(Piecewise(), 4, 2) == [1.0] * 4 + [0.1] * 2 + [0.01] * 2


def test_piecewise_milestones_in_epochs() -> None:
    bsr = Piecewise(milestones=(50, 100), factors=(0.1, 0.005))
    found = factors(bsr, 200, 3)
    assert found == [1.0] * 150 + [0.1] * 150 + [0.005] * 300


def test_piecewise_falls_within_an_epoch_where_a_share_says_so() -> None:
    assert factors(Piecewise(milestones=(0.5,), factors=(0.1,)), 1, 4) == [1.0, 1.0, 0.1, 0.1]


@given(percent=st.integers(1, 99), epochs=st.integers(1, 400), steps=st.integers(1, 50))
def test_a_share_of_training_is_met_at_the_very_step(percent: int, epochs: int, steps: int) -> None:
    """Exact arithmetic as the oracle: 0.55 · 100 is a little more than 55 in floating point."""
    schedule = Piecewise(milestones=(percent / 100,), factors=(0.1,))
    first = math.ceil(Fraction(percent, 100) * epochs * steps)
    assert schedule.factor(first, epochs, steps) == 0.1
    assert first == 0 or schedule.factor(first - 1, epochs, steps) == 1.0


def test_cosine() -> None:
    found = factors(Cosine(), 4, 1)
    assert found == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert factors(Cosine(end=0.2), 2, 1) == pytest.approx([1.0, 0.6])


def test_warm_up_rises_linearly_and_meets_the_shape() -> None:
    assert factors(Constant(warmup=2), 3, 2) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert factors(Constant(warmup=0.5), 1, 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    piecewise = Piecewise(warmup=1, milestones=(0.5,), factors=(0.1,))
    assert factors(piecewise, 2, 2) == pytest.approx([0.5, 1.0, 0.1, 0.1])


@given(epochs=st.integers(1, 40), steps=st.integers(1, 40), percent=st.integers(1, 99))
def test_a_warm_up_below_one_is_a_fraction_of_the_training(epochs: int, steps: int, percent: int) -> None:
    total = epochs * steps
    at = np.arange(total)
    length = percent / 100 * total
    cosine = np.cos(np.pi / 2 * np.clip((at - length) / (total - length), 0, 1)) ** 2
    expected = np.minimum(1, (at + 1) / length) * cosine
    np.testing.assert_allclose(factors(Cosine(warmup=percent / 100), epochs, steps), expected, atol=1e-12)


def test_cosine_starts_after_its_warm_up() -> None:
    found = factors(Cosine(warmup=2), 4, 2)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:] == pytest.approx([(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


@given(
    kind=st.sampled_from(
        [Constant(), Piecewise(), Cosine(), Cosine(warmup=3), Piecewise(warmup=1.5), Cosine(end=0.1)]
    ),
    epochs=st.integers(1, 300),
    steps=st.integers(1, 100),
    where=st.floats(0, 1, exclude_max=True),
)
def test_factors_lie_between_zero_and_one(kind: Schedule, epochs: int, steps: int, where: float) -> None:
    step = int(where * epochs * steps)
    assert 0 <= kind.factor(step, epochs, steps) <= 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("constant", {"warmup": -1.0}),
        ("piecewise", {"milestones": (0.5,)}),
        ("piecewise", {"milestones": (0.75, 0.5)}),
        ("piecewise", {"milestones": (-0.5, 0.5)}),
        ("piecewise", {"factors": (0.1, -0.01)}),
        ("cosine", {"end": -0.1}),
    ],
)
def test_schedules_that_cannot_be_are_refused(kind: str, options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        SCHEDULES[kind](**options)
