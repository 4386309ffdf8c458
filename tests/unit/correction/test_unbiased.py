"""The mean of the corrected gradients is the full gradient, and their variance is the parabola of the paper."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from correction_oracle import (
    Array,
    Batch,
    active_of,
    cross_entropy,
    gradient,
    gradient_of,
    make_batches,
    perceptron,
    vector_of,
)
from equipoise.correction import SAGA, SVRG, Correction, Estimator, Fixed, Gradient, full_pass
from equipoise.correction.full_pass import choose_batches
from equipoise.topology import GMP, SET, RigL, Topology

Mask = NDArray[np.bool_]

COEFFICIENTS = st.floats(-2, 3, allow_nan=False)
ALGORITHMS: dict[str, Any] = {
    "none": None,
    "set": SET(sparsity=0.5, every=3, drop_fraction=0.5),
    "rigl": RigL(sparsity=0.5, every=3, drop_fraction=0.5, until=1.0),
    "gmp": GMP(sparsity=0.7, every=3, until=1.0),
}


class Normed(nn.Module):
    """Convolution, BatchNorm, dropout: everything that makes a pass depend on more than its images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.conv(inputs[:, None])))).flatten(1))


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed().double()


def apart(
    estimator: Estimator, algorithm: str, model: nn.Module, batches: list[Batch]
) -> tuple[Correction, Topology | None]:
    """A correction whose snapshot is some steps and topology updates old."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    chosen = ALGORITHMS[algorithm]
    topology = None if chosen is None else chosen.attach(model, optimizer, 7)
    correction = estimator.attach(model, topology, total_steps=100)
    correction.refresh(batches, cross_entropy)
    masks = active_of(model, topology)
    for batch in make_batches(4, seed=9):  # the next step is no update
        cross_entropy(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (algorithm == "none") == np.array_equal(masks, active_of(model, topology))
    return correction, topology


def corrected_gradients(correction: Correction, batches: list[Batch]) -> Array:
    """The corrected gradients of all batches at the same weights."""
    found = []
    for i, batch in enumerate(batches):
        correction.model.zero_grad()
        correction.backward(cross_entropy, *batch, index=i)
        found.append(gradient_of(correction.model))
    correction.model.zero_grad()
    return np.array(found)


def autograd_gradients(model: nn.Module, batches: list[Batch], active: Mask | float = 1.0) -> Array:
    """Plain batch gradients of a copy of the model, without a correction."""
    model = copy.deepcopy(model)
    found = []
    for batch in batches:
        model.zero_grad()
        gradients = torch.autograd.grad(cross_entropy(model, *batch), list(model.parameters()))
        found.append(np.concatenate([g.numpy().ravel() for g in gradients]) * active)
    return np.array(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", ["recompute", "replay"])
@settings(max_examples=15, deadline=None)
@given(c=COEFFICIENTS)
def test_the_mean_over_an_epoch_is_the_full_gradient(mode: Any, algorithm: str, c: float) -> None:
    batches = make_batches(6)
    model = perceptron()
    correction, topology = apart(SVRG(coefficient=Fixed(c), mode=mode), algorithm, model, batches)
    found = corrected_gradients(correction, batches)
    plain = np.array([gradient(vector_of(model), b) for b in batches]) * active_of(model, topology)
    np.testing.assert_allclose(found.mean(0), plain.mean(0), rtol=0, atol=1e-13 * (1 + abs(c)))
    if abs(c) > 0.01:
        assert np.abs(found - plain).max() > 1e-4, "nothing was corrected"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", ["recompute", "replay"])
@settings(max_examples=5, deadline=None)
@given(c=COEFFICIENTS)
def test_pairs_are_exact_with_batch_statistics(mode: Any, algorithm: str, c: float) -> None:
    """BatchNorm in training mode makes a gradient depend on the whole batch; both passes run the same batch."""
    batches = make_batches(6, size=8)
    model = normed()
    model.drop.p = 0.0
    correction, topology = apart(SVRG(coefficient=Fixed(c), mode=mode), algorithm, model, batches)
    found = corrected_gradients(correction, batches)
    plain = autograd_gradients(model, batches, active_of(model, topology))
    np.testing.assert_allclose(found.mean(0), plain.mean(0), rtol=0, atol=1e-12 * (1 + abs(c)))


def test_dropout_masks_are_the_same_in_both_passes() -> None:
    """At the weights of the snapshot g_old equals g_new, and SVRG returns g̃ at every step."""
    batches = make_batches(6, size=8)
    for mode in ("recompute", "replay"):
        model = normed()
        correction = SVRG(mode=mode).attach(model)
        torch.manual_seed(5)
        correction.refresh(batches, cross_entropy)
        found = corrected_gradients(correction, batches)
        torch.manual_seed(5)
        plain = autograd_gradients(model, batches)
        np.testing.assert_allclose(found, np.broadcast_to(plain.mean(0), found.shape), rtol=1e-10, atol=1e-13)
        assert np.abs(plain - plain.mean(0)).max() > 1e-3


def test_dropout_masks_are_the_same_in_running() -> None:
    batches = make_batches(6, size=8)
    model = normed()
    correction = SVRG(mode="running").attach(model)
    correction.refresh(batches, cross_entropy)
    torch.manual_seed(5)
    found = corrected_gradients(correction, batches)
    torch.manual_seed(5)
    plain = autograd_gradients(model, batches)
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-10, atol=1e-13)
    for step in range(1, 6):
        # g_new - g_old is zero, so the mean of the earlier gradients is left.
        np.testing.assert_allclose(found[step], plain[:step].mean(0), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("algorithm", ["none", "set"])
def test_a_fraction_is_unbiased_over_its_subsets(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all subsets of two of five batches, and over all batches."""
    batches = make_batches(5)
    found = []
    for subset in combinations(range(5), 2):
        monkeypatch.setattr(full_pass, "choose_batches", lambda *_, s=subset: set(s))
        model = perceptron()
        correction, topology = apart(SVRG(coefficient=Fixed(0.8), batch_fraction=0.4), algorithm, model, batches)
        found.append(corrected_gradients(correction, batches))
    plain = np.array([gradient(vector_of(model), b) for b in batches]) * active_of(model, topology)
    np.testing.assert_allclose(np.mean(found, axis=(0, 1)), plain.mean(0), rtol=0, atol=1e-13)
    assert np.abs(np.mean(found[0], axis=0) - plain.mean(0)).max() > 1e-3, "one subset alone is not exact"


def test_subsets_are_drawn_evenly_and_by_the_seed() -> None:
    drawn = Counter[tuple[int, ...]]()
    for seed in range(2000):
        drawn[tuple(sorted(choose_batches(5, 0.4, seed, 1) or ()))] += 1
    assert len(drawn) == 10
    # 2000 draws over 10 subsets: 200 each with standard deviation 13.4
    assert max(abs(count - 200) for count in drawn.values()) < 5 * 13.4
    first, again, second = (choose_batches(50, 0.4, 3, refresh) for refresh in (1, 1, 2))
    assert first == again
    assert first != second, "every refresh draws another subset"


def test_running_is_unbiased_over_the_orders() -> None:
    """Over all orders of four batches, at every position."""
    batches = make_batches(4)
    found = []
    for order in permutations(range(4)):
        model = perceptron()
        correction, topology = apart(SVRG(coefficient=Fixed(0.9), mode="running"), "set", model, batches)
        found.append(corrected_gradients(correction, [batches[i] for i in order]))
    plain = np.array([gradient(vector_of(model), b) for b in batches]) * active_of(model, topology)
    for position in range(4):
        mean = np.mean([gradients[position] for gradients in found], axis=0)
        np.testing.assert_allclose(mean, plain.mean(0), rtol=0, atol=1e-13)


def test_saga_is_unbiased_for_rows_of_any_age() -> None:
    batches = make_batches(5)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    topology = SET(sparsity=0.5, every=3).attach(model, optimizer, 30)
    correction = SAGA().attach(model, topology)
    for _ in range(3):
        correction.refresh(batches, cross_entropy)
        for i, batch in enumerate(batches):
            correction.backward(cross_entropy, *batch, index=i)
            optimizer.step()
            optimizer.zero_grad()
    correction.refresh(batches, cross_entropy)
    state = copy.deepcopy(correction.state_dict())
    found = []
    for i, batch in enumerate(batches):  # from the same table each time, because a step changes it
        correction.load_state_dict(state)
        model.zero_grad()
        correction.backward(cross_entropy, *batch, index=i)
        found.append(gradient_of(model))
    plain = np.array([gradient(vector_of(model), b) for b in batches]) * active_of(model, topology)
    np.testing.assert_allclose(np.mean(found, axis=0), plain.mean(0), rtol=0, atol=1e-13)
    assert np.abs(np.array(found) - plain).max() > 1e-3


def test_bf16_tables_stay_unbiased() -> None:
    """The stored rows are rounded, and g̃ is the mean of the rounded rows."""
    batches = make_batches(6)
    model = perceptron()
    correction, _ = apart(SVRG(mode="replay", table="bf16"), "none", model, batches)
    exact, _ = apart(SVRG(mode="replay"), "none", perceptron(), batches)
    found, reference = corrected_gradients(correction, batches), corrected_gradients(exact, batches)
    plain = np.array([gradient(vector_of(model), b) for b in batches])
    np.testing.assert_allclose(found.mean(0), plain.mean(0), rtol=0, atol=1e-13)
    assert 1e-6 < np.abs(found - reference).max() < 1e-2


# The parabola


def variances(
    theta: Array, old: Array, batches: list[Batch], where: Mask | float = 1.0
) -> tuple[float, float, float]:
    """Var(g_new), Var(g_old) and Cov of batch gradients, summed over weights."""
    new_gradients = np.array([gradient(theta, b) for b in batches]) * where
    old_gradients = np.array([gradient(old, b) for b in batches]) * where
    new_gradients -= new_gradients.mean(0)
    old_gradients -= old_gradients.mean(0)
    return (
        float((new_gradients**2).sum(1).mean()),
        float((old_gradients**2).sum(1).mean()),
        float((new_gradients * old_gradients).sum(1).mean()),
    )


@pytest.mark.parametrize("mode", ["recompute", "replay"])
def test_variance_is_the_parabola(mode: Any) -> None:
    batches = make_batches(8)
    old = vector_of(perceptron())
    for c in (-0.5, 0.0, 0.3, 0.7, 1.0, 1.6):
        model = perceptron()
        correction, _ = apart(SVRG(coefficient=Fixed(c), mode=mode), "none", model, batches)
        found = corrected_gradients(correction, batches)
        measured = ((found - found.mean(0)) ** 2).sum(1).mean()
        new, before, covariance = variances(vector_of(model), old, batches)
        assert measured == pytest.approx(new + c**2 * before - 2 * c * covariance, rel=1e-10)


@pytest.mark.parametrize("mode", ["recompute", "replay"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_coefficient_sits_at_the_minimum(algorithm: str, mode: Any) -> None:
    """After all batches at the same weights, c is the minimum of the parabola over the corrected weights."""
    batches = make_batches(8)
    model = perceptron()
    estimator = SVRG(coefficient=Gradient(memory=1 - 1e-9, clamp=False), mode=mode)
    correction, topology = apart(estimator, algorithm, model, batches)
    corrected_gradients(correction, batches)
    then, masks = perceptron(), None  # the model of the snapshot
    if topology is not None:
        masks = ALGORITHMS[algorithm].attach(then, torch.optim.SGD(then.parameters(), lr=0.2), 7)
    where = active_of(then, masks) & active_of(model, topology)
    _, variance, covariance = variances(vector_of(model), vector_of(then), batches, where)
    assert float(correction.coefficient.report()["c"]) == pytest.approx(covariance / variance, rel=1e-9)


def test_the_gradient_coefficient_of_running_knows_the_noise_of_its_mean() -> None:
    """Over all orders, the moments at each position give the best weight for it.

    With t earlier batches of N drawn without replacement, E‖g_old - mean‖² is Var·N/(N-1)·(1 + 1/t), and the
    covariance of g_new with g_old - mean is Cov·N/(N-1): their ratio is the best weight for that position.
    """
    batches = make_batches(4)
    pairs: list[list[Array]] = []
    for order in permutations(range(4)):
        model = perceptron()
        correction, _ = apart(SVRG(coefficient=Gradient(memory=0.0), mode="running"), "none", model, batches)
        seen: list[Array] = []
        for i in order:
            correction.coefficient.load_state_dict({"steps": 0, "moments": None})
            model.zero_grad()
            correction.backward(cross_entropy, *batches[i])
            moments = correction.coefficient.state_dict()["moments"]
            seen.append(np.full(2, np.nan) if moments is None else moments[:, 0].numpy().copy())
        pairs.append(seen)
    _, variance, covariance = variances(vector_of(model), vector_of(perceptron()), batches)
    for t in (1, 2, 3):
        found = np.mean([seen[t] for seen in pairs], axis=0)
        np.testing.assert_allclose(found, [covariance * 4 / 3, variance * 4 / 3 * (1 + 1 / t)], rtol=1e-9)


def test_the_reported_variance_left_is_that_of_the_steps() -> None:
    batches = make_batches(8)
    model = perceptron()
    correction, _ = apart(SVRG(coefficient=Fixed(0.8)), "none", model, batches)
    found = corrected_gradients(correction, batches)
    plain = np.array([gradient(vector_of(model), b) for b in batches])
    report = correction.report()
    expected = found.var(0).sum() / plain.var(0).sum()
    assert report["variance_left"] == pytest.approx(expected, rel=1e-9)
    assert report["weight"] == pytest.approx(0.8)
    assert report["correction_norm"] == pytest.approx(np.linalg.norm(found - plain, axis=1).mean())
    assert report["corrected_steps"] == 8
    assert correction.report() == {"corrected_steps": 0.0}, "a report resets the sums"


def test_the_reported_variance_pools_segments_of_equal_masks() -> None:
    """After a change of masks the entries of the vector are other weights; their means are not mixed."""
    batches = make_batches(6)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    topology = SET(sparsity=0.5, every=1, drop_fraction=0.5).attach(model, optimizer, 9)
    correction = SVRG(coefficient=Fixed(0.5)).attach(model, topology)
    within, without = 0.0, 0.0
    for segment in range(2):
        correction.refresh(batches, cross_entropy)
        with torch.no_grad():
            model.last.bias.add_(0.3)
        found = corrected_gradients(correction, batches)
        plain = np.array([gradient(vector_of(model), b) for b in batches]) * active_of(model, topology)
        within, without = within + found.var(0).sum(), without + plain.var(0).sum()
        if segment == 0:
            cross_entropy(model, *batches[0]).backward()
            optimizer.step()
    assert topology.updates == 1
    assert correction.report()["variance_left"] == pytest.approx(within / without, rel=1e-9)
