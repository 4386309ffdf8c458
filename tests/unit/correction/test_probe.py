"""when="pays": correct only the epochs in which it beats a larger batch of the same cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from correction_oracle import (
    Array,
    Batch,
    cross_entropy,
    gradient,
    gradient_of,
    loss_and_gradient,
    make_batches,
    perceptron,
    vector_of,
)
from equipoise.correction import MVR, SAGA, SVRG, Agent, Correction


def displaced(estimator: Any, by: float, batches: list[Batch]) -> tuple[Correction, Array, Array]:
    """Refresh at some weights and again after a random displacement; return both weights."""
    model = perceptron()
    correction = estimator.attach(model)
    correction.refresh(batches, cross_entropy)
    assert not correction.enabled, "there is no older snapshot to compare with"
    assert correction.report()["pays"] == 0
    old = vector_of(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=by)
    now = vector_of(model)
    correction.refresh(batches, cross_entropy)
    return correction, old, now


def moments(old: Array, now: Array, batches: list[Batch]) -> tuple[float, float, float]:
    new_gradients = np.array([gradient(now, b) for b in batches])
    old_gradients = np.array([gradient(old, b) for b in batches])
    centred = [g - g.mean(0) for g in (new_gradients, old_gradients)]
    return tuple(float((centred[i] * centred[j]).sum()) for i, j in ((0, 0), (1, 1), (0, 1)))  # type: ignore


@pytest.mark.parametrize("mode", ["recompute", "replay", "running"])
@pytest.mark.parametrize(("by", "pays"), [(0.02, True), (3.0, False)])
def test_near_weights_pay_and_far_ones_do_not(by: float, pays: bool, mode: Any) -> None:
    estimator = SVRG(coefficient="gradient", when="pays", probe=6, mode=mode)
    correction, old, now = displaced(estimator, by, make_batches(10))
    new, before, covariance = moments(old, now, make_batches(10)[:6])
    c = min(max(covariance / before, 0), 1)
    left = 1 + (c**2 * before - 2 * c * covariance) / new
    report = correction.report()
    assert report["probe_variance_left"] == pytest.approx(left, rel=1e-9)
    assert report["probe_weight"] == pytest.approx(c, rel=1e-9)
    assert (left * estimator.cost < 1) == pays, "the case does not test its branch"
    assert report["pays"] == float(pays)
    assert correction.enabled == pays
    model = correction.model
    corrected = []
    for batch in make_batches(10)[:3]:
        model.zero_grad()
        correction.backward(cross_entropy, *batch)
        corrected.append(not np.allclose(gradient_of(model), gradient(now, batch), atol=1e-12))
    assert any(corrected) == pays


def test_svrg_far_away_would_make_it_worse() -> None:
    """c = 1 at any distance: the probe measures more variance than without correction."""
    correction, old, now = displaced(SVRG(when="pays", probe=6), -1.0, make_batches(10))
    new, before, covariance = moments(old, now, make_batches(10)[:6])
    report = correction.report()
    assert report["probe_variance_left"] == pytest.approx(1 + (before - 2 * covariance) / new, rel=1e-9)
    assert report["probe_variance_left"] > 1
    assert not correction.enabled


def test_the_loss_coefficient_is_smoothed_once_a_refresh() -> None:
    """The probe compares the losses and judges the resulting weight γ·c."""
    for mode in ("recompute", "replay", "running"):
        batches = make_batches(10)
        correction, old, now = displaced(Agent(gamma=1.0, when="pays", probe=6, mode=mode), 0.1, batches)
        losses = [np.array([loss_and_gradient(at, b)[0] for b in batches[:6]]) for at in (now, old)]
        found = np.cov(losses[0], losses[1])
        c = 0.3 * min(max(found[0, 1] / found[1, 1], 0), 1)
        new, before, covariance = moments(old, now, batches[:6])
        report = correction.report()
        assert report["c"] == pytest.approx(c, rel=1e-9)
        assert report["probe_weight"] == pytest.approx(c, rel=1e-9)
        assert report["probe_variance_left"] == pytest.approx(
            1 + (c**2 * before - 2 * c * covariance) / new, rel=1e-9
        )


def test_steps_that_are_not_corrected_keep_their_variance() -> None:
    """With half of the steps corrected, half of the reduction is left, at one and a half times the cost."""
    estimator = SVRG(coefficient="gradient", when="pays", probe=6, mode="running", step_fraction=0.5)
    correction, old, now = displaced(estimator, 0.3, make_batches(10))
    new, before, covariance = moments(old, now, make_batches(10)[:6])
    left = 1 - covariance**2 / before / new
    assert correction.report()["probe_variance_left"] == pytest.approx((left + 1) / 2, rel=1e-9)
    assert correction.enabled == ((left + 1) / 2 * 1.5 < 1)


@pytest.mark.parametrize(("every", "pays"), [(0, True), (40, True), (2, False)])
def test_a_mean_of_few_old_gradients_has_an_error_of_its_own(every: int, pays: bool) -> None:
    """√(2v) + 1/√m < 1, for a running mean over m steps."""
    estimator = SVRG(coefficient="gradient", when="pays", probe=6, mode="running", every=every)
    correction, old, now = displaced(estimator, 0.15, make_batches(10))
    new, before, covariance = moments(old, now, make_batches(10)[:6])
    left = 1 - covariance**2 / before / new
    assert (np.sqrt(2 * left) + (1 / np.sqrt(every) if every else 0) < 1) == pays, "the case does not test its branch"
    assert 2 * left < 1, "without the second term it would always pay"
    assert correction.enabled == pays


def test_a_full_pass_has_no_such_error() -> None:
    estimator = SVRG(coefficient="gradient", when="pays", probe=6, mode="recompute", every=2)
    assert displaced(estimator, 0.15, make_batches(10))[0].enabled


def test_epochs_that_do_not_pay_cost_only_the_probe() -> None:
    correction, *_ = displaced(SVRG(when="pays", probe=4), 3.0, make_batches(10))
    assert not correction.enabled
    assert correction.passes == {"forward": 8, "backward": 8}


def test_corrections_start_at_an_epoch() -> None:
    model, batches = perceptron(), make_batches(4)
    correction = Agent(from_epoch=2).attach(model)
    enabled = []
    for _ in range(4):
        correction.refresh(batches, cross_entropy)
        enabled.append(correction.enabled)
        with torch.no_grad():
            model.last.bias.add_(0.1)
    assert enabled == [False, False, True, True]
    # The third refresh compares losses with the snapshot of the second.
    assert correction.passes == {"forward": 4 * 2 + 4 * 2, "backward": 4 * 2}


def test_saga_pays_too() -> None:
    correction, *_ = displaced(SAGA(when="pays", probe=4), 0.02, make_batches(6))
    assert correction.enabled


def test_a_correction_that_paused_restarts_its_recursion() -> None:
    """The last estimate of MVR belongs to weights that have changed during the pause."""
    model, batches = perceptron(), make_batches(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    correction = MVR(from_epoch=1).attach(model)

    def epoch(number: int) -> None:
        correction.refresh(batches, cross_entropy, number)
        for batch in batches:
            correction.backward(cross_entropy, *batch)
            optimizer.step()
            optimizer.zero_grad()

    for number in (1, 0):  # corrected, then paused
        epoch(number)
    correction.refresh(batches, cross_entropy, 2)
    correction.backward(cross_entropy, *batches[0])
    np.testing.assert_allclose(gradient_of(model), gradient(vector_of(model), batches[0]), rtol=1e-10, atol=1e-13)


def test_both_passes_of_a_probe_share_their_dropout_masks() -> None:
    """With equal weights and equal dropout masks g_new is g_old, and no variance is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3)).double()
    correction = SVRG(when="pays", probe=4).attach(model)
    for _ in range(2):
        correction.refresh(make_batches(6), cross_entropy)
    assert correction.report()["probe_variance_left"] == pytest.approx(0, abs=1e-12)
