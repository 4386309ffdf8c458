"""Gradient statistics against numpy, and no side effects on the model."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise import SET, Static, Topology, UserError
from equipoise.analysis import Measurement, measure_gradients
from equipoise.analysis.gradient_statistics import Traces, perturbed
from equipoise.correction.active_vector import ActiveVector
from equipoise.errors import NonFiniteLoss
from equipoise.sparse import pack
from train_helpers import assert_same_state

Table = np.ndarray  # a row per batch, a column per active weight
CLASSES, FEATURES = 3, 5


# The oracle: softmax regression in numpy


def some_batches(count: int = 7, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        (torch.from_numpy(rng.standard_normal((6, FEATURES))), torch.from_numpy(rng.integers(CLASSES, size=6)))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def by_hand(weight: Table, bias: Table, x: Tensor, y: Tensor) -> tuple[float, Table, Table]:
    """Loss of a batch and its gradients: (p - onehot)ᵀ x / n and the column means of p - onehot."""
    logits = x.numpy() @ weight.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(p))
    loss = -np.log(p[rows, y.numpy()]).mean()
    p[rows, y.numpy()] -= 1
    return float(loss), p.T @ x.numpy() / len(p), p.mean(0)


def tables(model: nn.Linear, state: Mapping[str, Tensor], active: Table) -> tuple[Table, Table, Table]:
    """Losses of all batches, and their gradients of the active weights and of the bias."""
    found = [by_hand(state["weight"].numpy(), state["bias"].numpy(), x, y) for x, y in some_batches()]
    losses, weights, biases = zip(*found, strict=True)
    return np.array(losses), np.stack([each[active] for each in weights]), np.stack(biases)


def traces_by_hand(new: Table, old: Table) -> tuple[float, float, float]:
    pairs = [np.cov(new[:, i], old[:, i]) for i in range(new.shape[1])]
    return sum(p[0, 0] for p in pairs), sum(p[1, 1] for p in pairs), sum(p[0, 1] for p in pairs)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(FEATURES, CLASSES, dtype=torch.float64)


def sparse(model: nn.Module, sparsity: float = 0.6) -> Topology:
    return Static(sparsity=sparsity).attach(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_every_number_equals_its_formula(sparsity: float) -> None:
    model = linear()
    topology = sparse(model, sparsity) if sparsity else None
    active = topology.masks["weight"].numpy() if topology else np.ones((CLASSES, FEATURES), bool)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    old = {name: value + 0.3 * (value != 0) * torch.randn_like(value) for name, value in state.items()}
    report = measure_gradients(model, loss_of, some_batches(), old, of=28).report(gamma=0.2)

    losses, weights, biases = tables(model, state, active)
    losses_old, weights_old, biases_old = tables(model, old, active)
    new, before = np.hstack([weights, biases]), np.hstack([weights_old, biases_old])
    variance, variance_old, covariance = traces_by_hand(new, before)
    mean, mean_old = new.mean(0), before.mean(0)
    matrix = np.cov(losses, losses_old)
    c_hat, c_star = np.clip(matrix[0, 1] / matrix[1, 1], 0, 1), covariance / variance_old

    def left(c: float) -> float:
        return float((new - c * (before - mean_old)).var(0, ddof=1).sum() / variance)

    expected = {
        "variance": variance,
        "variance_old": variance_old,
        "variance_relative": variance / ((mean**2).sum() - variance / 7 * (1 - 7 / 28)),
        "norm": np.linalg.norm(new, axis=1).mean(),
        "norm_of_mean": np.linalg.norm(mean),
        "correlation": np.corrcoef(mean, mean_old)[0, 1],
        "correlation_of_batches": covariance / np.sqrt(variance * variance_old),
        "correlation_of_pairs": np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(new, before, strict=True)]),
        "c_star": c_star,
        "c_hat": c_hat,
    }
    assert {key: report[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    cs = {"0": 0.0, "c_hat": c_hat, "gamma_c_hat": 0.2 * c_hat, "c_star": c_star, "1": 1.0}
    assert report["variance_left"] == pytest.approx({name: left(c) for name, c in cs.items()}, rel=1e-9)
    parts = {"weight": (weights, weights_old), "bias": (biases, biases_old)}
    by_layer = {name: traces_by_hand(*part) for name, part in parts.items()}
    assert report["c_star_by_layer"] == pytest.approx({name: t[2] / t[1] for name, t in by_layer.items()}, rel=1e-9)
    remaining = sum(t[0] - t[2] ** 2 / t[1] for t in by_layer.values())
    assert report["variance_left_by_layer"] == pytest.approx(remaining / variance, rel=1e-9)
    assert (report["batches"], report["weights"], report["gamma"]) == (7, new.shape[1], 0.2)


def test_the_relative_variance_does_not_depend_on_the_number_of_batches() -> None:
    """Over all samples of k of the N batches; Var / ‖mean‖² itself would be near k if noise dominates."""
    rng = np.random.default_rng(0)
    rows = 0.5 + rng.standard_normal((10, 200))
    model = nn.Linear(200, 1, bias=False, dtype=torch.float64)
    batches = [(torch.from_numpy(row[None]),) for row in rows]

    def squared_norm(some: Sequence[tuple[Tensor]]) -> float:
        found = measure_gradients(model, lambda model, x: model(x).mean(), some, of=10)
        assert found.variance_relative is not None
        return found.traces.new / found.variance_relative

    exact = float((rows.mean(0) ** 2).sum())
    assert squared_norm(batches) == pytest.approx(exact)
    for k in (2, 5):
        estimates = [squared_norm(some) for some in combinations(batches, k)]
        assert np.mean(estimates) == pytest.approx(exact)  # unbiased, by enumeration


def test_too_few_batches_give_no_relative_variance() -> None:
    model = nn.Linear(1, 1, bias=False)
    batches = [(torch.tensor([[value]]),) for value in (1.0, -1.0)]
    found = measure_gradients(model, lambda model, x: model(x).mean(), batches, of=100)
    assert found.variance_relative is None


def test_float32_gradients_are_summed_in_float64() -> None:
    """Gradients of 10⁴ that differ by 10⁻²: the variance would vanish in float32 sums of squares."""
    rng = np.random.default_rng(0)
    rows = (1e4 + 1e-2 * rng.standard_normal((50, 4))).astype(np.float32)
    model = nn.Linear(4, 1, bias=False)
    found = measure_gradients(model, lambda model, x: model(x).mean(), [(torch.from_numpy(r[None]),) for r in rows])
    assert found.traces.new == pytest.approx(rows.astype(np.float64).var(0, ddof=1).sum(), rel=1e-9)
    assert found.traces.c_star == pytest.approx(1)  # a linear loss has the same gradient everywhere


def test_a_huge_mean_does_not_hide_the_variance() -> None:
    rng = np.random.default_rng(0)
    rows = 1e9 + rng.standard_normal((50, 4))
    model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    found = measure_gradients(model, lambda model, x: model(x).mean(), [(torch.from_numpy(r[None]),) for r in rows])
    assert found.traces.new == pytest.approx(rows.var(0, ddof=1).sum(), rel=1e-6)


def test_batchnorm_uses_the_statistics_of_the_batch_at_both_weights() -> None:
    """BatchNorm in training mode, against torch.func at the old and the new weights."""
    model = net(dropout=0.0)
    old = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    found = measure_gradients(model, loss_of, some_batches(), old)

    def gradients(parameters: dict[str, Tensor]) -> Table:
        def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            return F.cross_entropy(torch.func.functional_call(model, (p, buffers), (x,)), y)

        rows = [torch.func.grad(loss)(parameters, x, y) for x, y in some_batches()]
        return np.stack([torch.cat([g.reshape(-1) for g in row.values()]).numpy() for row in rows])

    expected = traces_by_hand(gradients({n: p.detach() for n, p in model.named_parameters()}), gradients(old))
    assert tuple(found.traces) == pytest.approx(expected, rel=1e-9)


# Invariants


def net(dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def test_without_noise_both_passes_are_equal() -> None:
    """Dropout and batch statistics are the same in both passes, so the variance at c = 1 is zero."""
    report = measure_gradients(net(), loss_of, some_batches(), noise=0.0).report()
    assert report["correlation"] == pytest.approx(1)
    assert (report["c_star"], report["c_hat"]) == (1, 1)
    assert report["variance_left"]["1"] == pytest.approx(0, abs=1e-12)


@given(seed=st.integers(0, 999), layers=st.integers(1, 4), c=st.floats(-3, 3))
def test_c_star_is_the_minimum_of_the_parabola(seed: int, layers: int, c: float) -> None:
    rng = np.random.default_rng(seed)
    parts = {}
    for i in range(layers):
        new = rng.standard_normal((6, 3))
        parts[str(i)] = Traces(*traces_by_hand(new, rng.uniform(-1, 2) * new + rng.standard_normal((6, 3))))
    found = Measurement(6, 6, 3 * layers, parts, 1.0, 1.0, None, None, 0.5)
    least = found.variance_left()["c_star"]
    assert least is not None
    assert least <= found.traces.left(c) + 1e-12
    assert -1e-12 <= found.variance_left_by_layer <= least + 1e-12
    assert found.variance_left()["0"] == 1
    assert least == pytest.approx(1 - (found.correlation_of_batches or 0) ** 2)


@settings(max_examples=10, deadline=None)
@given(scale=st.floats(0.1, 10), order=st.permutations(range(7)))
def test_scaled_losses_in_another_order(scale: float, order: list[int]) -> None:
    model, batches = linear(), some_batches()
    plain = measure_gradients(model, loss_of, batches).report()
    scaled = measure_gradients(model, lambda *a: scale * loss_of(*a), [batches[i] for i in order]).report()
    powers = {"variance": 2, "variance_old": 2, "norm": 1, "norm_of_mean": 1}
    for key, value in plain.items():
        expected = value * scale ** powers[key] if key in powers else value
        assert scaled[key] == pytest.approx(expected, rel=1e-8), key


def test_more_noise_means_less_correlation() -> None:
    found = [measure_gradients(net(), loss_of, some_batches(), noise=noise) for noise in (0.01, 0.1, 1.0)]
    correlations = [each.correlation or 0.0 for each in found]
    assert 1 > correlations[0] > correlations[1] > correlations[2]


def test_noise_is_added_to_active_weights_alone() -> None:
    model = nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))
    mask = sparse(model, 0.8).masks["0.weight"]
    vector = ActiveVector(list(model.parameters()), Topology.of(model))
    first, again, other = (perturbed(model, vector, 0.015, seed).tensors for seed in (0, 0, 1))
    assert not first["0.weight"][~mask].any()
    moves = torch.cat([(first[name] - p)[p != 0].detach() for name, p in model.named_parameters()])
    assert float(moves.std()) == pytest.approx(0.015, rel=0.1)
    assert abs(float(moves.mean())) < 0.002
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    own = model.state_dict()
    assert torch.equal(first["1.running_var"], own["1.running_var"])
    assert not torch.equal(first["1.weight"], own["1.weight"])


def test_noise_everywhere_includes_inactive_weights_and_gradients_stay_those_of_active_ones() -> None:
    model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, CLASSES))
    topology = sparse(model, 0.8)
    mask = topology.masks["0.weight"]
    vector = ActiveVector(list(model.parameters()), topology)
    moved = perturbed(model, vector, 0.015, everywhere=True).tensors
    for part in (mask, ~mask):
        change = (moved["0.weight"] - model[0].weight)[part].detach()
        assert float(change.std()) == pytest.approx(0.015, rel=0.1)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 60, generator=generator), torch.arange(8) % CLASSES) for _ in range(5)]
    found = measure_gradients(model, loss_of, batches, everywhere=True)
    assert found.report() == measure_gradients(model, loss_of, batches, moved).report()
    assert found.weights == topology.active + 50 + CLASSES
    alone = measure_gradients(model, loss_of, batches)
    assert alone.traces.new == pytest.approx(found.traces.new, rel=1e-12)
    assert alone.traces.old != pytest.approx(found.traces.old, rel=1e-3)


def test_noise_everywhere_is_refused_in_packed_storage() -> None:
    algorithm = Static(sparsity=0.9)
    model = pack(nn.Sequential(nn.Linear(FEATURES * 8, 40), nn.ReLU(), nn.Linear(40, CLASSES)), algorithm)
    algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1)
    with pytest.raises(UserError, match="packed storage has no inactive weights"):
        measure_gradients(model, loss_of, some_batches(), everywhere=True)


# No side effects


def everything(model: nn.Module) -> dict[str, Any]:
    return {
        "state": copy.deepcopy(model.state_dict()),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "storage": [p.data_ptr() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "python": str(random.getstate()),
    }


def drawing_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss that draws from all random number streams."""
    return loss_of(model, x + 1e-3 * random.random() + 1e-3 * np.random.rand() + 1e-3 * torch.rand(()), y)  # noqa: NPY002


def test_the_model_is_left_unchanged() -> None:
    model = net()
    sparse(model)
    loss_of(model, *some_batches()[0]).backward()
    before = everything(model)
    measure_gradients(model, drawing_loss, some_batches())
    assert_same_state(everything(model), before)


def test_the_model_is_left_unchanged_by_a_measurement_that_fails() -> None:
    model = net()
    before = everything(model)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model(x)
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        measure_gradients(model, loss, some_batches())
    assert_same_state(everything(model), before)


def test_the_given_weights_are_left_unchanged() -> None:
    model = net()
    old = copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(old)
    measure_gradients(model, loss_of, some_batches(), old)
    assert_same_state(old, kept)


# Memory and devices


@pytest.mark.slow
def test_memory_does_not_grow_with_the_batches() -> None:
    model, held = nn.Linear(200, 100), []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        held.append(sum(o.numel() for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)))
        return model(x).square().mean()

    measure_gradients(model, loss, (torch.randn(2, 200) for _ in range(12)))
    early, late = held[6], held[-2]  # the same pass of two iterations
    assert late - early < 1000  # of 20,100 weights


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    # No ReLU: after BatchNorm, a unit without active inputs is a rounding error whose sign a ReLU would amplify.
    # No bias before BatchNorm: its gradient, and so its coefficient, would be a rounding error.
    first = nn.Linear(FEATURES, 8, bias=False)
    model = nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    sparse(model)
    on_cpu = measure_gradients(model, loss_of, some_batches()).report()
    model.cuda()
    on_gpu = measure_gradients(model, loss_of, [(x.cuda(), y.cuda()) for x, y in some_batches()]).report()
    for key, value in on_cpu.items():
        assert on_gpu[key] == pytest.approx(value, rel=1e-8), key


# Errors


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"noise": -0.1}, "noise=-0.1 must be a standard deviation"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"noise": float("inf")}, "noise=inf"),
        ({"batches": some_batches(1)}, "at least 2 batches, not 1"),
        ({"batches": []}, "at least 2 batches, not 0"),
        ({"old": {"weight": torch.zeros(CLASSES, FEATURES)}}, 'the old weights have no "bias"'),
        (
            {"old": {"weight": torch.zeros(2, 2), "bias": torch.zeros(CLASSES)}},
            '"weight" has shape (2, 2) in the snapshot and (3, 5) in the model',
        ),
    ],
)
def test_wrong_input_is_explained(change: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"batches": some_batches(), **change}
    with pytest.raises(UserError) as error:
        measure_gradients(linear(), loss_of, **arguments)
    assert told in str(error.value)


def test_a_frozen_model_and_a_loss_that_is_not_finite_are_explained() -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        measure_gradients(linear().requires_grad_(False), loss_of, some_batches())
    with pytest.raises(NonFiniteLoss, match="batch 1 of the measurement"):
        measure_gradients(linear(), lambda *a: loss_of(*a) * float("nan"), some_batches())


def test_undefined_ratios_are_none() -> None:
    """The same batch three times: nothing varies."""
    report = measure_gradients(linear(), loss_of, some_batches(1) * 3).report()
    assert report["variance"] == pytest.approx(0, abs=1e-30)
    assert report["c_hat"] is None
    assert report["variance_left"]["c_hat"] is None
    assert report["correlation"] is not None


def test_a_custom_loop_with_a_topology() -> None:
    """The weights of an earlier state_dict are measured against."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = SET(sparsity=0.5, every=2).attach(model, optimizer, total_steps=10)
    earlier = copy.deepcopy(model.state_dict())
    for x, y in some_batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = measure_gradients(model, loss_of, some_batches(), earlier)
    assert found.weights == topology.active + 8 + CLASSES
