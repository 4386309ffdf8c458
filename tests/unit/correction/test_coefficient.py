"""The coefficient c: from losses, from gradients, fixed, falling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.correction import (
    COEFFICIENTS,
    CORRECTIONS,
    MVR,
    SAGA,
    SGD,
    SVRG,
    Agent,
    AgentReducedRate,
    AlphaSVRG,
    AsPublished,
    Estimator,
    Fixed,
    FixedC,
    Gradient,
    Linear,
    Loss,
)
from equipoise.errors import UserError

LOSSES = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=20)


@settings(deadline=None)
@given(rounds=st.lists(LOSSES, min_size=1, max_size=4), alpha=st.floats(0, 1), clamp=st.booleans())
def test_losses_are_smoothed_as_in_algorithm_1(rounds: list[Any], alpha: float, clamp: bool) -> None:
    coefficient = Loss(smoothing=alpha, clamp=clamp).make()
    c = 0.0
    for pairs in rounds:
        new, old = np.array(pairs).T
        coefficient.observe_losses(torch.from_numpy(new), torch.from_numpy(old))
        spread = old.var(ddof=1)
        if spread < 1e-9 * max(1, old.max()) ** 2:  # too close to a division by zero to be compared in digits
            return
        c_hat = np.cov(new, old, ddof=1)[0, 1] / spread
        c = (1 - alpha) * c + alpha * (min(max(c_hat, 0), 1) if clamp else c_hat)
        assert coefficient.value(0.5) == pytest.approx(c, rel=1e-9, abs=1e-9)


@given(st.integers(1, 40), st.floats(0, 1))
def test_the_published_coefficient_is_a_schedule(epochs: int, alpha: float) -> None:
    """np.cov of a list of losses with itself over its variance, smoothed as in the published code."""
    coefficient, c = AsPublished(smoothing=alpha).make(), 0.0
    for epoch in range(epochs):
        coefficient.restart(1)
        losses = np.random.default_rng(epoch).normal(size=9)
        c_hat = np.cov(losses, losses, ddof=1)[0][1] / np.var(losses, ddof=1)
        c = (1 - alpha) * c + alpha * c_hat if epoch else 0.0
        assert coefficient.value(0.0) == pytest.approx(c, abs=1e-12)
        assert c == pytest.approx(1 - (1 - alpha) ** epoch, abs=1e-12)


def test_without_a_spread_of_losses_c_stays() -> None:
    coefficient = Loss(smoothing=0.3).make()
    assert coefficient.value(0.0) == 0.0
    assert coefficient.report() == {"c": 0.0}
    coefficient.observe_losses(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0]))
    assert coefficient.value(0.0) == pytest.approx(0.3)
    for new, old in (
        ([1.0, 2.0], [5.0, 5.0]),  # no variance
        ([1.0], [2.0]),  # one batch
        ([1.0, 2.0], [float("inf"), 1.0]),  # the old weights overflow where the new ones do not
        ([1.0, 2.0], [float("nan"), 1.0]),
    ):
        coefficient.observe_losses(torch.tensor(new), torch.tensor(old))
        assert coefficient.value(0.0) == pytest.approx(0.3)


def test_the_loss_coefficient_is_computed_in_double_precision() -> None:
    """Losses that differ in their last digits only, as they do late in training."""
    random = np.random.default_rng(0)
    old = (5 + 1e-3 * random.standard_normal(100)).astype(np.float32)
    new = (4 + 0.5 * (old.astype(np.float64) - 5)).astype(np.float32)
    coefficient = Loss(smoothing=1.0).make()
    coefficient.observe_losses(torch.from_numpy(new), torch.from_numpy(old))
    expected = np.cov(new.astype(np.float64), old.astype(np.float64))
    assert coefficient.c == pytest.approx(expected[0, 1] / expected[1, 1], rel=1e-10)


def test_fixed_and_linear() -> None:
    assert [Fixed(0.4).make().value(p) for p in (0.0, 0.5, 1.0)] == [0.4, 0.4, 0.4]
    assert [Linear(0.8).make().value(p) for p in (0.0, 0.25, 1.0, 1.5)] == pytest.approx([0.8, 0.6, 0.0, 0.0])


@pytest.mark.parametrize("per_layer", [False, True])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), steps=st.integers(1, 30), beta=st.floats(0, 0.99))
def test_gradients_are_averaged_with_more_weight_on_the_newest(
    per_layer: bool, seed: int, steps: int, beta: float
) -> None:
    """The weights of the average written out: the i-th of n counts s_i·∏(1 - s_j) over j > i, s = max(1-β, 1/i)."""
    random = np.random.default_rng(seed)
    sizes = [3, 1, 4]
    coefficient = Gradient(memory=beta, per_layer=per_layer, clamp=False).make()
    pairs = random.standard_normal((steps, 2, 8))
    for change, scatter in pairs:
        coefficient.observe_gradients(torch.from_numpy(change), torch.from_numpy(scatter), sizes)
    shares = np.maximum(1 - beta, 1 / np.arange(1, steps + 1))
    counts = np.array([shares[i] * np.prod(1 - shares[i + 1 :]) for i in range(steps)])
    assert counts.sum() == pytest.approx(1)
    layers = np.split(np.arange(8), np.cumsum(sizes)[:-1]) if per_layer else [np.arange(8)]
    for value, layer in zip(np.atleast_1d(coefficient.value(0.0)), layers, strict=True):
        covariance = counts @ (pairs[:, 0, layer] * pairs[:, 1, layer]).sum(1)
        variance = counts @ (pairs[:, 1, layer] ** 2).sum(1)
        assert value == pytest.approx(covariance / variance, rel=1e-9)


def test_a_new_snapshot_keeps_the_last_word_as_one_observation() -> None:
    coefficient = Gradient(memory=0.9).make()
    one, half = torch.ones(4).double(), torch.full((4,), 0.5).double()
    for _ in range(50):
        coefficient.observe_gradients(half, one, [4])
    coefficient.restart(1)
    coefficient.observe_gradients(one, one, [4])
    assert float(coefficient.value(0.0)) == pytest.approx((0.5 + 1.0) / 2)
    coefficient.observe_gradients(one, one, [4])
    assert float(coefficient.value(0.0)) == pytest.approx((0.5 + 1.0 + 1.0) / 3)


def test_gradient_coefficients_are_clamped_unless_told() -> None:
    one = torch.ones(4)
    for factor, expected in ((3.0, 1.0), (-2.0, 0.0), (0.25, 0.25)):
        clamped, free = Gradient().make(), Gradient(clamp=False).make()
        for coefficient in (clamped, free):
            coefficient.observe_gradients(factor * one, one, [4])
        assert float(clamped.value(0.0)) == expected
        assert float(free.value(0.0)) == factor


def test_layers_that_never_scatter_are_not_corrected() -> None:
    coefficient = Gradient(per_layer=True).make()
    coefficient.observe_gradients(torch.ones(4), torch.tensor([0.0, 0.0, 1.0, 1.0]), [2, 2])
    assert coefficient.value(0.0).tolist() == [0.0, 1.0]  # type: ignore[union-attr]


def test_an_overflow_does_not_stay_in_the_average() -> None:
    coefficient = Gradient().make()
    for bad in (torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan"), 1.0])):
        coefficient.observe_gradients(bad, torch.ones(2), [2])
        assert float(coefficient.value(0.0)) == 0.0
    coefficient.observe_gradients(torch.full((2,), 0.5), torch.ones(2), [2])
    assert float(coefficient.value(0.0)) == pytest.approx(0.5)
    coefficient.observe_gradients(torch.ones(2), torch.full((2,), float("inf")), [2])
    assert float(coefficient.value(0.0)) == pytest.approx(0.5)


def test_the_papers_numbers_are_the_defaults() -> None:
    assert (Agent().gamma, Agent().mode) == (0.1, "recompute")
    assert Agent().coefficient == Loss(smoothing=0.3, clamp=True, batch_fraction=None)
    assert (FixedC().gamma, FixedC().coefficient) == (1.0, Fixed(0.1))
    assert (SVRG().gamma, SVRG().coefficient) == (1.0, Fixed(1.0))
    assert AlphaSVRG().coefficient == Linear(0.75)
    assert (MVR().gamma, MVR().coefficient) == (1.0, Fixed(0.9))
    assert AgentReducedRate().learning_rate_factor == 0.1
    assert AgentReducedRate().gamma == 1.0
    assert Agent().learning_rate_factor == 1.0


@pytest.mark.parametrize(
    ("estimator", "coefficient"),
    [
        (SVRG(coefficient="gradient"), Gradient()),
        (SVRG(coefficient={"name": "gradient", "per_layer": True}), Gradient(per_layer=True)),
        (Agent(coefficient=Loss(smoothing=0.5)), Loss(smoothing=0.5)),
        (Agent(coefficient={"smoothing": "5e-1"}), Loss(smoothing=0.5)),
        (FixedC(coefficient={"name": "fixed", "value": 0.5}), Fixed(0.5)),
        (FixedC(coefficient={"value": 0.5}), Fixed(0.5)),
        (FixedC(coefficient="fixed"), Fixed(0.1)),
        (AlphaSVRG(coefficient={"start": 1}), Linear(1.0)),
        (SVRG(coefficient="linear"), Linear(0.75)),
    ],
)
def test_a_coefficient_is_chosen_by_options_name_or_mapping(estimator: Estimator, coefficient: object) -> None:
    assert estimator.coefficient == coefficient


@pytest.mark.parametrize(
    ("coefficient", "message"),
    [
        ("losses", 'no coefficient is called "losses"; did you mean "loss"?'),
        ({"name": "losses"}, 'no coefficient is called "losses"; did you mean "loss"?'),
        (0.5, "coefficient=0.5 must be one of fixed, linear, loss, gradient"),
        ({"name": ["loss"]}, "coefficient={'name': ['loss']} must be one of fixed, linear, loss, gradient"),
        ({"smooth": 0.5}, 'coefficient: no option is called "smooth"; did you mean "smoothing"?'),
        ({"name": "gradient", "smoothing": 0.5}, 'coefficient: no option is called "smoothing"'),
        ({"smoothing": "much"}, "coefficient.smoothing='much': expected a number"),
        ({"smoothing": 2}, "coefficient: smoothing=2.0 must be between 0 and 1"),
        ({"batch_fraction": 0}, "coefficient: batch_fraction=0.0 must be above 0 and at most 1"),
        ({"name": "gradient", "memory": 1}, "coefficient: memory=1.0 must be at least 0 and below 1"),
    ],
)
def test_a_wrong_coefficient_is_one_line(coefficient: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        Agent(coefficient=coefficient)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


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
        (Loss, {"smoothing": -0.1}),
        (Agent, {"batch_fraction": 0}),
        (Agent, {"batch_fraction": 1.2}),
        (Agent, {"step_fraction": 0}),
        (Loss, {"batch_fraction": 0.0}),
        (Gradient, {"memory": 1.0}),
        (Agent, {"every": -1}),
        (Agent, {"from_epoch": -1}),
        (Agent, {"probe": 1}),
        (Agent, {"mode": "replay", "batch_fraction": 0.5}),
        (Agent, {"mode": "replay", "step_fraction": 0.5}),
        (Agent, {"mode": "running", "batch_fraction": 0.5}),
        (Agent, {"mode": "repeat"}),
        (Agent, {"when": "never"}),
        (Agent, {"table": "fp8"}),
        (Fixed, {"value": float("inf")}),
        (Linear, {"start": float("nan")}),
        (MVR, {"mode": "running"}),
        (SAGA, {"mode": "recompute"}),
        (SAGA, {"step_fraction": 0.5}),
        (MVR, {"when": "pays"}),
        (MVR, {"coefficient": "gradient"}),
        (SAGA, {"coefficient": "loss"}),
    ],
)
def test_wrong_options_are_refused(kind: type[Any], options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        kind(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("catalogue", [CORRECTIONS, COEFFICIENTS])
def test_a_catalogue_describes_each_entry_in_a_line(catalogue: Any) -> None:
    described = catalogue.describe()
    assert all(described.values())
    assert len(set(described.values())) == len(described)


def test_a_misspelt_correction_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match="agent"):
        CORRECTIONS["agnet"]
