"""When the topology changes, and by how much."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import UserError
from equipoise.topology.schedule import Decay, Window, decay, interval

KINDS = get_args(Decay)
shares = st.floats(0, 1)
windows = st.builds(
    lambda every, ends, total: Window(every, min(ends), max(ends), total),
    st.integers(1, 50),
    st.tuples(shares, shares).filter(lambda ends: ends[0] != ends[1]),
    st.integers(1, 400),
)


@given(start=shares, end=shares, progress=shares)
def test_decays_follow_their_formulas(start: float, end: float, progress: float) -> None:
    assert decay("constant", start, end, progress) == start
    assert decay("linear", start, end, progress) == pytest.approx((1 - progress) * start + progress * end)
    half_angle = math.cos(math.pi * progress / 2) ** 2  # (1 + cos 2a) / 2 = cos² a
    assert decay("cosine", start, end, progress) == pytest.approx(end + (start - end) * half_angle)


@given(kind=st.sampled_from(KINDS), start=shares, end=shares, a=st.floats(-1, 2), b=st.floats(-1, 2))
def test_decays_are_monotone_and_stay_between_their_ends(
    kind: Decay, start: float, end: float, a: float, b: float
) -> None:
    early, late = decay(kind, start, end, min(a, b)), decay(kind, start, end, max(a, b))
    low, high = min(start, end), max(start, end)
    assert low - 1e-12 <= early <= high + 1e-12
    assert (late - early) * (end - start) >= -1e-12


@given(windows)
def test_updates_are_the_multiples_inside_the_window(window: Window) -> None:
    updates = [step for step in range(-5, window.total + 100) if window.contains(step)]
    first, last = round(window.begin * window.total), round(window.until * window.total)
    assert updates == [step for step in range(first + 1, last) if step % window.every == 0]
    assert window.last_update == (updates[-1] if updates else 0)
    assert window.total not in updates  # what the last step grew would never be trained


@given(windows)
def test_progress_rises_and_completion_is_one_at_the_last_update(window: Window) -> None:
    updates = [step for step in range(1, window.total + 1) if window.contains(step)]
    for measure in (window.progress, window.completion):
        values = [measure(step) for step in updates]
        assert values == sorted(values)
        assert all(0 < value <= 1 for value in values)
    if updates:
        assert window.completion(updates[-1]) == 1


def test_the_schedules_of_the_papers() -> None:
    rigl = Window(every=100, begin=0, until=0.75, total=1000)
    assert [step for step in range(1001) if rigl.contains(step)] == [100, 200, 300, 400, 500, 600, 700]
    itop = Window(every=400, begin=0, until=1, total=1200)
    assert [step for step in range(1201) if itop.contains(step)] == [400, 800]


@given(percent=st.integers(1, 99), total=st.integers(1, 10_000))
def test_an_interval_below_one_is_a_fraction_of_the_training(percent: int, total: int) -> None:
    steps = interval(percent / 100, total)
    assert steps >= 1
    assert steps == 1 or abs(Fraction(percent, 100) * total - steps) <= Fraction(1, 2) + Fraction(1, 10**9)
    assert interval(percent, total) == percent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 0, 1, 10), "every=0"),
        ((1, 0.5, 0.5, 10), "begin < until"),
        ((1, -0.1, 1, 10), "begin=-0.1"),
        ((1, 0, 1.5, 10), "until=1.5"),
        ((1, 0, 1, 0), "total_steps=0"),
    ],
)
def test_impossible_windows_are_refused_in_one_line(options: tuple[int, float, float, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Window(*options)
    assert "\n" not in str(error.value)


def test_an_unknown_decay_is_refused() -> None:
    with pytest.raises(UserError, match=r'"cosin".*constant, linear, cosine'):
        decay("cosin", 0.3, 0, 0)  # type: ignore[arg-type]
