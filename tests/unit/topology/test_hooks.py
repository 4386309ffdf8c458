"""A topology in somebody's own training loop: clipping, accumulation, AMP, schedulers, compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from equipoise.sparse import pack
from equipoise.topology import ALGORITHMS, SNFS, RigL, Topology
from topology_helpers import (
    SPARSE,
    Made,
    assert_same_tensors,
    assert_sparse,
    attach,
    backward,
    batch,
    make,
    perceptron,
    train,
)


def active_norm(topology: Topology, model: nn.Module, gradients: dict[str, Tensor]) -> Tensor:
    masks = topology.masks
    parts = [g[masks[name]] if name in masks else g.flatten() for name, g in gradients.items()]
    return torch.cat(parts).norm()


def dense_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """By torch.autograd.grad, which runs no hook of a parameter."""
    inputs, labels = batch(step)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters), strict=True))


@pytest.mark.parametrize("algorithm", SPARSE)
def test_clipping_sees_the_norm_of_the_active_gradient(algorithm: str) -> None:
    model, optimizer, topology = make(algorithm)
    for step in range(8):
        optimizer.zero_grad()
        expected = active_norm(topology, model, dense_gradients(model, step))
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(norm, expected)
        optimizer.step()
        assert_sparse(topology)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_the_gradient_before_a_step_is_the_same_in_both_storages(algorithm: str) -> None:
    """Update steps included: a bound between the norms of dense and sparse gradients once clipped in one of them."""
    options = {"distribution": "erk"} if algorithm == "bsr-net" else {} if algorithm == "static" else {"every": 3}
    chosen = ALGORITHMS[algorithm](sparsity=0.7, **options)
    models: list[nn.Module] = [perceptron(), pack(perceptron(), chosen)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    topologies = [chosen.attach(m, o, 40) for m, o in zip(models, optimizers, strict=True)]
    for step in range(1 if algorithm == "bsr-net" else 8):  # the storages draw other indices for its new weights
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        torch.testing.assert_close(*norms)
        for masked, packed in zip(*(topology.layers for topology in topologies), strict=True):
            assert masked.parameter.grad is not None
            assert packed.index is not None
            dense = masked.parameter.grad.reshape(-1)
            torch.testing.assert_close(dense[packed.index.long()], packed.parameter.grad)
            assert torch.count_nonzero(dense) <= packed.active
        for optimizer in optimizers:
            optimizer.step()
        for layers in zip(*(topology.layers for topology in topologies), strict=True):
            torch.testing.assert_close(layers[0].weight, layers[1].weight)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_accumulation_equals_one_big_batch(algorithm: str) -> None:
    models, topologies = [], []
    for parts in (1, 4):
        model, optimizer, topology = make(algorithm, dtype=torch.float64)
        for step in range(8):
            optimizer.zero_grad()
            inputs, labels = batch(step, dtype=torch.float64)
            for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
                (F.cross_entropy(model(x), y) / parts).backward()
            optimizer.step()
        models.append(model)
        topologies.append(topology)
    for name, mask in topologies[0].masks.items():
        assert torch.equal(mask, topologies[1].masks[name])
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, right)


def amp_step(made: Made, scaler: torch.amp.GradScaler, step: int, poison: float = 1.0) -> None:
    model, optimizer, _ = made
    optimizer.zero_grad()
    inputs, labels = batch(step)
    scaler.scale(F.cross_entropy(model(inputs), labels) * poison).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("algorithm", SPARSE)
def test_a_step_that_amp_skips_leaves_no_trace(algorithm: str) -> None:
    """Infinite gradients before each kind of step, updates included: as if those batches had never been."""
    clean, poisoned = make(algorithm), make(algorithm)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000) for _ in range(2)]
    for step in range(8):
        amp_step(clean, scalers[0], step)
        before = poisoned[2].steps
        amp_step(poisoned, scalers[1], step + 100, poison=torch.inf)
        assert poisoned[2].steps == before
        scalers[1].update(2.0**10)
        amp_step(poisoned, scalers[1], step)
    assert clean[2].updates == poisoned[2].updates
    assert_same_tensors(clean[0], poisoned[0])
    assert_sparse(poisoned[2])


@pytest.mark.parametrize("algorithm", SPARSE)
def test_scaled_gradients_make_no_difference(algorithm: str) -> None:
    plain, scaled = make(algorithm), make(algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)  # a power of two: exact
    for step in range(8):
        plain[1].zero_grad()
        backward(plain[0], step)
        plain[1].step()
        amp_step(scaled, scaler, step)
    assert_same_tensors(plain[0], scaled[0])


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("algorithm", ["rigl", "snfs", "mest", "granet"])
def test_gradients_that_a_fused_optimizer_unscales_make_no_difference(algorithm: str, skip: bool) -> None:
    """They are still scaled when its hooks look at them."""
    masks = []
    for scaled in (False, True):
        model = perceptron()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
        options = {"step_at_update": "skip"} if skip else {}
        topology = attach(algorithm, model, optimizer, 40, sparsity=0.7, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)  # it doubles
        for step in range(14):
            inputs, labels = batch(step)
            scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        masks.append(topology.masks)
    for name, mask in masks[0].items():
        assert torch.equal(mask, masks[1][name])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("algorithm", ["rigl", "set", "snfs", "bsr-net"])
def test_a_step_that_a_fused_optimizer_skips_itself_leaves_no_trace(algorithm: str, packed: bool) -> None:
    """A GradScaler calls it with infinite gradients and a flag: as if those batches had never been."""
    models, topologies = [], []
    for overflow in (False, True):
        options = {"distribution": "erk"} if algorithm == "bsr-net" else {"every": 3}
        chosen = ALGORITHMS[algorithm](sparsity=0.7, **options)
        model: nn.Module = pack(perceptron(), chosen) if packed else perceptron()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
        topology = chosen.attach(model, optimizer, 40)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(8):
            for poison in (torch.inf, 1.0) if overflow else (1.0,):
                inputs, labels = batch(step)
                scaler.scale(F.cross_entropy(model(inputs), labels) * poison).backward()
                scaler.step(optimizer)
                scaler.update(2.0**10)
                optimizer.zero_grad()
        models.append(model)
        topologies.append(topology)
    assert [topology.steps for topology in topologies] == [8, 8]
    assert topologies[0].updates == topologies[1].updates > 0
    assert_same_tensors(*models)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_snfs_remembers_unscaled_gradients_while_the_loss_scale_changes(packed: bool, clipped: bool) -> None:
    """The gradients of inactive weights are recorded before a GradScaler unscales those of active ones."""
    memories = []
    for scaled in (False, True):
        chosen = SNFS(sparsity=0.7, every=3)
        model: nn.Module = pack(perceptron(), chosen) if packed else perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        topology = chosen.attach(model, optimizer, 40)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1, enabled=scaled)  # it doubles
        for step in range(10):
            inputs, labels = batch(step)
            scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
            if clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        memories.append([layer.memory for layer in topology.layers])
    torch.testing.assert_close(memories[0], memories[1])


def test_an_overflow_that_a_fused_optimizer_handles_itself_does_not_stay() -> None:
    """It is given infinite gradients and a flag, and its hooks run: SNFS must not remember the infinity."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    topology = SNFS(sparsity=0.7, every=3).attach(model, optimizer, total_steps=20)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.ones(1)  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    train(model, optimizer, range(6))
    assert all(layer.memory is not None and layer.memory.isfinite().all() for layer in topology.layers)
    assert_sparse(topology)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_bf16_autocast(algorithm: str) -> None:
    model, optimizer, topology = make(algorithm)
    for step in range(8):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        assert_sparse(topology)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("algorithm", ["static", "rigl"])
def test_schedulers_may_be_built_before_and_after(scheduler: str, algorithm: str) -> None:
    """Peers wrap optimizer.step in a function that a scheduler built later cannot wrap again."""
    models = []
    for before in (True, False):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
            schedule = SCHEDULERS[scheduler](optimizer) if before else None
            topology = attach(algorithm, model, optimizer, 20, sparsity=0.7)
            schedule = schedule or SCHEDULERS[scheduler](optimizer)
            for step in range(9):
                train(model, optimizer, range(step, step + 1))
                schedule.step()
                assert_sparse(topology)
        models.append(model)
    assert_same_tensors(*models)


def compiled_equals_plain(algorithm: str, **options: Any) -> None:
    models = []
    for compiled in (False, True):
        model = perceptron(dtype=torch.float64)
        running: Any = torch.compile(model, **options) if compiled else model
        optimizer = torch.optim.SGD(running.parameters(), lr=0.1, momentum=0.9)
        topology = attach(algorithm, running, optimizer, 20, sparsity=0.7)
        assert list(topology.masks) == ["first.weight", "last.weight"]
        for step in range(8):
            train(running, optimizer, range(step, step + 1))
            assert_sparse(topology)
        models.append(model)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_masked_too(backend: str) -> None:
    compiled_equals_plain("rigl", backend=backend, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["set", "rigl", "snfs"])
def test_models_compiled_by_inductor_are_masked_too(algorithm: str) -> None:
    compiled_equals_plain(algorithm, fullgraph=True)


def test_names_and_kinds_of_the_models_state_do_not_change() -> None:
    model = perceptron()
    before = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = [type(p) for p in model.parameters()]
    RigL().attach(model, optimizer, total_steps=1000)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()} == before
    assert [type(p) for p in model.parameters()] == kinds
    perceptron(seed=1).load_state_dict(model.state_dict())  # into a model that knows nothing of us


def test_detaching_gives_an_ordinary_model_back() -> None:
    model, optimizer, topology = make("rigl")
    train(model, optimizer, range(2))
    topology.detach()
    train(model, optimizer, range(2, 6))
    assert topology.steps == 2
    assert all(torch.count_nonzero(p) == p.numel() for p in model.parameters())


def test_project_keeps_an_average_on_the_topology() -> None:
    model, optimizer, topology = make("rigl")
    average = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    train(model, optimizer, range(4))
    topology.project(average)
    assert torch.equal(average["first.weight"] != 0, topology.masks["first.weight"])
    assert average["first.bias"].all()
