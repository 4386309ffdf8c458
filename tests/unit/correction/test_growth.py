"""Growth by the batch gradient or by the corrected one, against masks worked out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from correction_oracle import (
    LAYERS,
    Array,
    Batch,
    Oracle,
    active_of,
    assert_follows,
    cross_entropy,
    gradient,
    gradient_of,
    make_batches,
    perceptron,
    vector_of,
)
from equipoise.correction import SVRG, Correction
from equipoise.topology import SNFS, GraNet, RigL, Topology

WEIGHTS = [0, 2]  # of the four parameters, the sparse ones
BATCHES = make_batches(6)
DROP = 0.4


def grown(theta: Array, active: Any, scores: Array, regrow: bool) -> Any:
    """RigL by hand: per layer, drop the smallest |w|, then grow the weights with the largest score."""
    active = active.copy()
    for layer in (LAYERS[i] for i in WEIGHTS):
        mask = active[layer].copy()
        count = round(DROP * mask.sum())
        if not regrow:
            count = min(count, int((~mask).sum()))
        order = np.argsort(np.where(mask, np.abs(theta[layer]), np.inf), kind="stable")
        candidates = ~mask
        mask[order[:count]] = False
        if regrow:
            candidates = ~mask
        best = np.argsort(-np.where(candidates, np.abs(scores[layer]), -np.inf), kind="stable")[:count]
        mask[best] = True
        active[layer] = mask
    return active


def made(mode: Any, **options: Any) -> tuple[Correction, torch.optim.Optimizer, Topology]:
    """Attach SVRG to RigL; the snapshot is three steps old at the first update."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rigl = RigL(sparsity=0.5, every=4, drop_fraction=DROP, drop_decay="constant", until=1.0, **options)
    topology = rigl.attach(model, optimizer, 40)
    return SVRG(mode=mode).attach(model, topology), optimizer, topology


def dense_pair(correction: Correction, old: Array, batches: list[Batch], step: int) -> tuple[Array, Array]:
    """The gradient of a step at every weight, and the part that SVRG subtracts."""
    theta = vector_of(correction.model)
    new, before = gradient(theta, batches[step]), gradient(old, batches[step])
    if correction.estimator.mode == "running":
        return new, before - np.mean([gradient(old, b) for b in batches[:step]], axis=0)
    return new, before - np.mean([gradient(old, b) for b in batches], axis=0)


def to_the_update(correction: Correction, optimizer: torch.optim.Optimizer) -> Array:
    """Refresh and take the three steps before the update; return the weights of the snapshot."""
    correction.refresh(BATCHES, cross_entropy)
    old = vector_of(correction.model)
    for batch in BATCHES[:3]:
        correction.backward(cross_entropy, *batch)
        optimizer.step()
        optimizer.zero_grad()
    return old


@pytest.mark.parametrize("regrow", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "replay", "running"])
@pytest.mark.parametrize("growth", ["batch", "corrected"])
def test_growth_uses_the_chosen_gradient(growth: Any, mode: Any, regrow: bool) -> None:
    correction, optimizer, topology = made(mode, growth=growth, regrow=regrow)
    old = to_the_update(correction, optimizer)
    theta, active = vector_of(correction.model), active_of(correction.model, topology)
    batch, removed = dense_pair(correction, old, BATCHES, 3)
    scores = {"batch": batch, "corrected": batch - removed}
    correction.backward(cross_entropy, *BATCHES[3])
    np.testing.assert_allclose(gradient_of(correction.model)[active], (batch - removed)[active], rtol=1e-9)
    optimizer.step()
    expected = {kind: grown(theta, active, score, regrow) for kind, score in scores.items()}
    assert topology.updates == 1
    assert np.array_equal(active_of(correction.model, topology), expected[growth])
    assert not np.array_equal(expected["batch"], expected["corrected"]), "the case does not tell the two apart"


def test_regrowth_scores_just_dropped_weights_by_the_batch_gradient() -> None:
    """With `batch`, inactive weights are not corrected; weights that were just dropped must not be either."""
    correction, optimizer, topology = made("recompute", regrow=True)
    old = to_the_update(correction, optimizer)
    theta, active = vector_of(correction.model), active_of(correction.model, topology)
    batch, removed = dense_pair(correction, old, BATCHES, 3)
    half_corrected = np.where(active, batch - removed, batch)
    correction.backward(cross_entropy, *BATCHES[3])
    optimizer.step()
    expected = grown(theta, active, batch, True)
    assert np.array_equal(active_of(correction.model, topology), expected)
    assert not np.array_equal(expected, grown(theta, active, half_corrected, True)), (
        "the case does not tell the two apart"
    )


@pytest.mark.parametrize("growth", ["batch", "corrected"])
def test_growth_with_accumulated_gradients(growth: Any) -> None:
    """Two micro-batches at the update step: the mean of both gradients counts, corrected or not."""
    correction, optimizer, topology = made("recompute", growth=growth, regrow=True)
    old = to_the_update(correction, optimizer)
    theta, active = vector_of(correction.model), active_of(correction.model, topology)
    pairs = [dense_pair(correction, old, BATCHES, step) for step in (3, 4)]
    batch, removed = np.mean(pairs, axis=0)
    for step in (3, 4):
        correction.backward(cross_entropy, *BATCHES[step], scale=0.5)
    np.testing.assert_allclose(gradient_of(correction.model)[active], (batch - removed)[active], rtol=1e-9)
    optimizer.step()
    score = batch if growth == "batch" else batch - removed
    assert np.array_equal(active_of(correction.model, topology), grown(theta, active, score, True))


def test_a_step_that_was_not_taken_is_forgotten() -> None:
    """After an overflow under loss scaling the gradients are zeroed and another batch follows."""
    correction, optimizer, topology = made("recompute", regrow=True)
    old = to_the_update(correction, optimizer)
    theta, active = vector_of(correction.model), active_of(correction.model, topology)
    correction.backward(cross_entropy, *BATCHES[4])
    optimizer.zero_grad()
    batch, _ = dense_pair(correction, old, BATCHES, 3)
    correction.backward(cross_entropy, *BATCHES[3])
    optimizer.step()
    assert np.array_equal(active_of(correction.model, topology), grown(theta, active, batch, True))


@pytest.mark.parametrize("every_index", [False, True])
def test_the_optimizer_sees_zero_gradients_of_inactive_weights(every_index: bool) -> None:
    """At every step `.grad` is exactly zero there, also if corrected growth keeps old gradients for them.

    A weight grown since the snapshot then has an old gradient and is corrected like the others.
    """
    correction, optimizer, topology = made("recompute", growth="corrected" if every_index else "batch")
    oracle = Oracle("recompute", 1.0, every_index=every_index)
    model = correction.model
    for _ in range(4):
        correction.refresh(BATCHES, cross_entropy)
        oracle.refresh(vector_of(model), active_of(model, topology), BATCHES)
        for i, batch in enumerate(BATCHES):
            active = active_of(model, topology)
            expected = oracle.step(vector_of(model), active, batch, i)
            correction.backward(cross_entropy, *batch)
            found = gradient_of(model)
            np.testing.assert_allclose(found[active], expected[active], rtol=1e-9, atol=1e-12)
            assert not found[~active].any()
            optimizer.step()
            optimizer.zero_grad()
            assert not vector_of(model)[~active_of(model, topology)].any()
    assert topology.updates >= 4


@pytest.mark.parametrize("algorithm", [SNFS(sparsity=0.5, every=4), GraNet(sparsity=0.6, every=4, until=1.0)])
def test_snfs_and_granet_grow_by_the_batch_gradient_too(algorithm: Any) -> None:
    """The recorded gradients are those of the batch, computed by hand at every step."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    topology = algorithm.attach(model, optimizer, 40)
    correction = SVRG().attach(model, topology)
    memory = np.zeros(len(vector_of(model)))
    for _ in range(3):
        correction.refresh(BATCHES, cross_entropy)
        for batch in BATCHES:
            dense = gradient(vector_of(model), batch)
            memory = 0.9 * memory + 0.1 * dense
            correction.backward(cross_entropy, *batch)
            if isinstance(algorithm, SNFS) or topology.update_is_next:
                found = np.concatenate([layer.gradient.numpy() for layer in topology.layers])
                expected = np.concatenate([dense[LAYERS[i]] for i in WEIGHTS])
                np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(algorithm, SNFS):
        found = np.concatenate([layer.memory.numpy() for layer in topology.layers if layer.memory is not None])
        np.testing.assert_allclose(found, np.concatenate([memory[LAYERS[i]] for i in WEIGHTS]), rtol=1e-9, atol=1e-12)


def test_corrections_find_the_topology_of_their_model() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    assert Topology.of(model) is None
    topology = RigL(sparsity=0.5, every=4).attach(model, optimizer, 40)
    correction = SVRG().attach(model)
    assert correction.topology is topology
    assert_follows(Oracle("recompute", 1.0), correction, optimizer, make_batches(3), epochs=1)
    topology.detach()
    assert Topology.of(model) is None
