"""The coefficient c: from losses, from gradients, fixed, falling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.correction import (
    CORRECTIONS,
    MVR,
    SAGA,
    SGD,
    SVRG,
    Agent,
    AgentReducedRate,
    AlphaSVRG,
    Estimator,
    FixedC,
)
from equipoise.correction.coefficient import (
    FixedCoefficient,
    GradientCoefficient,
    LinearCoefficient,
    LossCoefficient,
)
from equipoise.errors import UserError

LOSSES = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=20)


@settings(deadline=None)
@given(rounds=st.lists(LOSSES, min_size=1, max_size=4), alpha=st.floats(0, 1), clamp=st.booleans())
def test_losses_are_smoothed_as_in_algorithm_1(rounds: list[Any], alpha: float, clamp: bool) -> None:
    coefficient = LossCoefficient(alpha, clamp)
    c = 0.0
    for pairs in rounds:
        new, old = np.array(pairs).T
        coefficient.see_losses(torch.from_numpy(new), torch.from_numpy(old))
        spread = old.var(ddof=1)
        if spread < 1e-9 * max(1, old.max()) ** 2:  # too close to a division by zero to be compared in digits
            return
        c_hat = np.cov(new, old, ddof=1)[0, 1] / spread
        c = (1 - alpha) * c + alpha * (min(max(c_hat, 0), 1) if clamp else c_hat)
        assert coefficient.value(0.5) == pytest.approx(c, rel=1e-9, abs=1e-9)


def test_without_a_spread_of_losses_c_stays() -> None:
    coefficient = LossCoefficient(0.3)
    assert coefficient.value(0.0) == 0.0
    assert coefficient.report() == {"c": 0.0}
    coefficient.see_losses(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0]))
    assert coefficient.value(0.0) == pytest.approx(0.3)
    for new, old in (
        ([1.0, 2.0], [5.0, 5.0]),  # no variance
        ([1.0], [2.0]),  # one batch
        ([1.0, 2.0], [float("inf"), 1.0]),  # the old weights overflow where the new ones do not
        ([1.0, 2.0], [float("nan"), 1.0]),
    ):
        coefficient.see_losses(torch.tensor(new), torch.tensor(old))
        assert coefficient.value(0.0) == pytest.approx(0.3)


def test_the_loss_coefficient_is_computed_in_double_precision() -> None:
    """Losses that differ in their last digits only, as they do late in training."""
    random = np.random.default_rng(0)
    old = (5 + 1e-3 * random.standard_normal(100)).astype(np.float32)
    new = (4 + 0.5 * (old.astype(np.float64) - 5)).astype(np.float32)
    coefficient = LossCoefficient(1.0)
    coefficient.see_losses(torch.from_numpy(new), torch.from_numpy(old))
    expected = np.cov(new.astype(np.float64), old.astype(np.float64))
    assert coefficient.c == pytest.approx(expected[0, 1] / expected[1, 1], rel=1e-10)


def test_fixed_and_linear() -> None:
    assert [FixedCoefficient(0.4).value(p) for p in (0.0, 0.5, 1.0)] == [0.4, 0.4, 0.4]
    assert [LinearCoefficient(0.8).value(p) for p in (0.0, 0.25, 1.0, 1.5)] == pytest.approx([0.8, 0.6, 0.0, 0.0])


@pytest.mark.parametrize("per_layer", [False, True])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), steps=st.integers(1, 30), beta=st.floats(0, 0.99))
def test_gradients_are_averaged_with_more_weight_on_the_newest(
    per_layer: bool, seed: int, steps: int, beta: float
) -> None:
    """The weights of the average written out: the i-th of n counts s_i·∏(1 - s_j) over j > i, s = max(1-β, 1/i)."""
    random = np.random.default_rng(seed)
    sizes = [3, 1, 4]
    coefficient = GradientCoefficient(beta, per_layer, clamp=False)
    pairs = random.standard_normal((steps, 2, 8))
    for change, scatter in pairs:
        coefficient.see_gradients(torch.from_numpy(change), torch.from_numpy(scatter), sizes)
    shares = np.maximum(1 - beta, 1 / np.arange(1, steps + 1))
    counts = np.array([shares[i] * np.prod(1 - shares[i + 1 :]) for i in range(steps)])
    assert counts.sum() == pytest.approx(1)
    layers = np.split(np.arange(8), np.cumsum(sizes)[:-1]) if per_layer else [np.arange(8)]
    for value, layer in zip(np.atleast_1d(coefficient.value(0.0)), layers, strict=True):
        covariance = counts @ (pairs[:, 0, layer] * pairs[:, 1, layer]).sum(1)
        variance = counts @ (pairs[:, 1, layer] ** 2).sum(1)
        assert value == pytest.approx(covariance / variance, rel=1e-9)


def test_a_new_snapshot_keeps_the_last_word_as_one_observation() -> None:
    coefficient = GradientCoefficient(0.9)
    one, half = torch.ones(4).double(), torch.full((4,), 0.5).double()
    for _ in range(50):
        coefficient.see_gradients(half, one, [4])
    coefficient.restart(1)
    coefficient.see_gradients(one, one, [4])
    assert float(coefficient.value(0.0)) == pytest.approx((0.5 + 1.0) / 2)
    coefficient.see_gradients(one, one, [4])
    assert float(coefficient.value(0.0)) == pytest.approx((0.5 + 1.0 + 1.0) / 3)


def test_gradient_coefficients_are_clamped_unless_told() -> None:
    one = torch.ones(4)
    for factor, expected in ((3.0, 1.0), (-2.0, 0.0), (0.25, 0.25)):
        clamped, free = GradientCoefficient(), GradientCoefficient(clamp=False)
        for coefficient in (clamped, free):
            coefficient.see_gradients(factor * one, one, [4])
        assert float(clamped.value(0.0)) == expected
        assert float(free.value(0.0)) == factor


def test_layers_that_never_scatter_are_not_corrected() -> None:
    coefficient = GradientCoefficient(per_layer=True)
    coefficient.see_gradients(torch.ones(4), torch.tensor([0.0, 0.0, 1.0, 1.0]), [2, 2])
    assert coefficient.value(0.0).tolist() == [0.0, 1.0]  # type: ignore[union-attr]


def test_an_overflow_does_not_stay_in_the_average() -> None:
    coefficient = GradientCoefficient()
    for bad in (torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan"), 1.0])):
        coefficient.see_gradients(bad, torch.ones(2), [2])
        assert float(coefficient.value(0.0)) == 0.0
    coefficient.see_gradients(torch.full((2,), 0.5), torch.ones(2), [2])
    assert float(coefficient.value(0.0)) == pytest.approx(0.5)
    coefficient.see_gradients(torch.ones(2), torch.full((2,), float("inf")), [2])
    assert float(coefficient.value(0.0)) == pytest.approx(0.5)


def test_the_papers_numbers_are_the_defaults() -> None:
    assert (Agent().gamma, Agent().smoothing, Agent().coefficient, Agent().mode) == (0.1, 0.3, "loss", "recompute")
    assert Agent().clamp
    assert (FixedC().gamma * FixedC().value, SVRG().gamma * SVRG().value) == (0.1, 1.0)
    assert (AlphaSVRG().value, AlphaSVRG().coefficient) == (0.75, "linear")
    assert (MVR().value, MVR().gamma) == (0.9, 1.0)
    assert AgentReducedRate().learning_rate_factor == 0.1
    assert AgentReducedRate().gamma == 1.0
    assert Agent().learning_rate_factor == 1.0


def test_costs_are_those_of_the_passes() -> None:
    """By hand, a forward pass counting 1 and a backward pass 2, over SGD's 3."""
    assert Agent().cost == pytest.approx((3 + 3 + 3 + 1) / 3)
    assert Agent(mode="replay").cost == pytest.approx((3 + 3 + 0.1) / 3)
    assert Agent(mode="running").cost == pytest.approx((3 + 3) / 3)
    assert Agent(mode="running", step_fraction=0.25).cost == pytest.approx((3 + 0.75) / 3)
    assert Agent(batch_fraction=0.25).cost == pytest.approx((3 + 3 + 0.25 * (3 + 1)) / 3)
    assert SVRG().cost == pytest.approx((3 + 3 + 3) / 3)
    assert MVR().cost == pytest.approx(2.0)
    assert MVR(step_fraction=0.5).cost == pytest.approx(1.5)
    assert SAGA().cost == SGD().cost == 1.0
    assert Agent(when="pays").cost == pytest.approx(3.0), "the probe compares losses, the full pass does not"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Agent, {"gamma": 1.5}),
        (Agent, {"gamma": float("nan")}),
        (Agent, {"smoothing": -0.1}),
        (Agent, {"batch_fraction": 0}),
        (Agent, {"batch_fraction": 1.2}),
        (Agent, {"step_fraction": 0}),
        (Agent, {"memory": 1.0}),
        (Agent, {"loss_share": 0.0}),
        (Agent, {"every": -1}),
        (Agent, {"from_epoch": -1}),
        (Agent, {"probe": 1}),
        (Agent, {"mode": "replay", "batch_fraction": 0.5}),
        (Agent, {"mode": "replay", "step_fraction": 0.5}),
        (Agent, {"mode": "running", "batch_fraction": 0.5}),
        (Agent, {"coefficient": "losses"}),
        (Agent, {"mode": "repeat"}),
        (Agent, {"when": "never"}),
        (Agent, {"table": "fp8"}),
        (SVRG, {"value": float("inf")}),
        (MVR, {"when": "pays"}),
        (MVR, {"coefficient": "gradient"}),
        (SAGA, {"coefficient": "loss"}),
    ],
)
def test_wrong_numbers_are_refused(kind: type[Estimator], options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        kind(**options)
    assert "\n" not in str(error.value)


def test_the_catalogue_describes_each_in_a_line() -> None:
    described = CORRECTIONS.describe()
    assert all(described.values())
    assert len(set(described.values())) == len(described)
    with pytest.raises(UserError, match="agent"):
        CORRECTIONS["agnet"]
