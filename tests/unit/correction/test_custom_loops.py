"""Corrections in custom training loops: optimizers, clipping, accumulation, bf16, norms, frozen layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from correction_oracle import Batch, Oracle, active_of, cross_entropy, make_batches, perceptron, vector_of
from equipoise.correction import MVR, SAGA, SVRG, Agent, AgentMVR, Correction, Estimator, Fixed, Gradient
from equipoise.topology import SET, RigL, Topology

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}
ESTIMATORS: dict[str, Estimator] = {
    "agent": Agent(gamma=0.8),
    "replay": SVRG(mode="replay", coefficient="gradient"),
    "running": SVRG(mode="running", coefficient=Gradient(per_layer=True)),
    "agent-mvr": AgentMVR(gamma=0.8),
    "saga": SAGA(),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_optimizers_take_the_corrected_gradient_and_nothing_else(optimizer: str, clip: float) -> None:
    """A second model is given the oracle's gradient by hand; clipping sees it too, decay comes after it."""
    batches = make_batches()
    models = [perceptron(), perceptron()]
    makers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    topologies = [
        SET(sparsity=0.5, every=3).attach(model, maker, 21) for model, maker in zip(models, makers, strict=True)
    ]
    correction = SVRG(coefficient=Fixed(0.7)).attach(models[0], topologies[0])
    oracle = Oracle("recompute", 0.7)
    for _ in range(4):
        correction.refresh(batches, cross_entropy)
        oracle.refresh(vector_of(models[1]), active_of(models[1], topologies[1]), batches)
        for i, batch in enumerate(batches):
            correction.backward(cross_entropy, *batch)
            found = oracle.step(vector_of(models[1]), active_of(models[1], topologies[1]), batch, i)
            for p, part in zip(models[1].parameters(), split(models[1], found), strict=True):
                p.grad = part
            for model, maker in zip(models, makers, strict=True):
                if clip:
                    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                    assert norm > clip
                maker.step()
                maker.zero_grad()
            np.testing.assert_allclose(vector_of(models[0]), vector_of(models[1]), rtol=1e-7, atol=1e-9)
    assert topologies[0].updates >= 4


def split(model: nn.Module, vector: Any) -> list[Tensor]:
    sizes = [p.numel() for p in model.parameters()]
    parts = torch.from_numpy(vector).split(sizes)
    return [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]


@pytest.mark.parametrize("name", ["recompute", "replay", "running", "gradient"])
def test_accumulation_is_the_mean_of_the_micro_batches(name: str) -> None:
    """Three corrected micro-batches of a third each, against their three gradients taken one by one."""
    options: dict[str, Any] = {"gradient": {"coefficient": "gradient"}}.get(name, {"mode": name})
    batches = make_batches(6)
    results = []
    for accumulate in (True, False):
        model = perceptron()
        correction = SVRG(**options).attach(model)
        correction.refresh(batches, cross_entropy)
        with torch.no_grad():
            model.last.weight.add_(0.2)
        total = [torch.zeros_like(p) for p in model.parameters()]
        for batch in batches[:3]:
            if not accumulate:
                model.zero_grad()
            correction.backward(cross_entropy, *batch, scale=1 / 3 if accumulate else 1.0)
            for sum_, p in zip(total, model.parameters(), strict=True):
                assert p.grad is not None
                sum_ += p.grad / 3
        results.append([p.grad for p in model.parameters()] if accumulate else total)
        report = correction.report()
        results.append([torch.tensor([report[key] for key in sorted(report)])])
    for one, other in ((results[0], results[2]), (results[1], results[3])):
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13, check_dtype=False)


def test_accumulation_equals_one_big_batch() -> None:
    """SVRG on two halves with scale 1/2 is SVRG on the whole: without BatchNorm a mean of means."""
    big = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs(make_batches(9, size=4)[:8])]
    micro = make_batches(9, size=4)[:8]
    found = []
    for batches, parts in ((big, 1), (micro, 2)):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        SET(sparsity=0.5, every=2).attach(model, optimizer, 40)
        correction = SVRG().attach(model)
        for _ in range(3):
            correction.refresh(batches, cross_entropy)
            for i, batch in enumerate(batches):
                correction.backward(cross_entropy, *batch, scale=1 / parts)
                if (i + 1) % parts == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(vector_of(model))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9, atol=1e-12)


def pairs(batches: list[Batch]) -> Iterator[tuple[Batch, Batch]]:
    return zip(batches[::2], batches[1::2], strict=True)


def test_gradients_that_were_there_before_stay() -> None:
    """The gradient is added to `.grad`, and the coefficient observes the new part alone."""
    batches = make_batches(4)
    runs = []
    for start in (None, 0.0, 5.0):
        model = perceptron()
        correction = SVRG(coefficient="gradient").attach(model)
        correction.refresh(batches, cross_entropy)
        with torch.no_grad():
            model.last.weight.add_(0.2)
        for batch in batches:
            for p in model.parameters():
                p.grad = None if start is None else torch.full_like(p, start)
            correction.backward(cross_entropy, *batch)
        runs.append(torch.cat([p.grad.flatten() - (start or 0.0) for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    torch.testing.assert_close(runs[0], runs[2], rtol=1e-9, atol=1e-12)


class Zoo(nn.Module):
    """One of each norm, dropout, a residual path, a tied and an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.group_norm = nn.GroupNorm(2, 8)
        self.layer_norm = nn.LayerNorm(6)
        self.drop = nn.Dropout(0.2)
        self.first = nn.Linear(48, 12)
        self.tied = nn.Linear(48, 12)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer_norm(self.group_norm(torch.relu(self.batch_norm(self.conv(inputs[:, None])))))
        flat = self.drop(hidden).flatten(1)
        return self.last(torch.tanh(self.first(flat) + self.tied(flat)))


def zoo_loss(model: nn.Module, inputs: Tensor, labels: Tensor, bf16: bool = False) -> Tensor:
    """A custom loss: optional autocast, label smoothing, a penalty."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(inputs)
    return F.cross_entropy(logits.float(), labels, label_smoothing=0.1) + 1e-3 * logits.float().square().mean()


def reference_step(model: nn.Module, old: nn.Module, batches: list[Any], i: int, seeds: list[Tensor]) -> list[Tensor]:
    """SVRG by plain autograd on copies of the model, each pass with the random numbers of its batch."""

    def gradients(of: nn.Module, number: int) -> list[Tensor]:
        torch.set_rng_state(seeds[number])
        of = copy.deepcopy(of)
        parameters = [p for p in of.parameters() if p.requires_grad]
        found = torch.autograd.grad(zoo_loss(of, *batches[number]), parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]

    rows = [gradients(old, number) for number in range(len(batches))]
    full = [torch.stack(parts).mean(0) for parts in zip(*rows, strict=True)]
    return [n - o + f for n, o, f in zip(gradients(model, i), gradients(old, i), full, strict=True)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "replay"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_with_everything(mode: Any, bf16: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Zoo()
    if frozen:
        model.conv.requires_grad_(False)
    batches = [(x, y, bf16) for x, y in make_batches(4, size=8, dtype=torch.float32)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    SET(sparsity=0.5, every=100).attach(model, optimizer, 1000)
    correction = SVRG(mode=mode).attach(model)
    start = torch.get_rng_state()
    correction.refresh(batches, zoo_loss)
    old = copy.deepcopy(model)
    seeds = []  # the states that the epoch's passes begin with
    for batch in batches:
        seeds.append(torch.get_rng_state())
        zoo_loss(copy.deepcopy(model), *batch)
    torch.set_rng_state(start)
    masks = correction.topology.masks if correction.topology is not None else {}
    for i, batch in enumerate(batches):
        expected = reference_step(model, old, batches, i, seeds)
        torch.set_rng_state(seeds[i])
        correction.backward(zoo_loss, *batch)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for (name, p), wanted in zip(trained, expected, strict=True):
            wanted = torch.where(masks[name], wanted, 0.0) if name in masks else wanted
            found = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)
        assert model.unused.weight.grad is None
        assert frozen == (model.conv.weight.grad is None)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["recompute", "replay", "running", "saga"])
def test_layers_may_be_frozen_and_unfrozen_during_training(name: str) -> None:
    """A frozen layer gets no gradient; an unfrozen one is corrected from the next refresh on."""
    estimator = SAGA() if name == "saga" else SVRG(mode=name, coefficient=Gradient(per_layer=True))  # type: ignore
    model, batches = perceptron(), make_batches(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SET(sparsity=0.5, every=3).attach(model, optimizer, 100)
    correction = estimator.attach(model)
    first = model.first.weight.detach().clone()
    for epoch in range(6):
        correction.refresh(batches, cross_entropy)
        for i, batch in enumerate(batches):
            model.first.requires_grad_(not (epoch == 1 or (epoch == 2 and i < 2) or (epoch == 3 and i > 1)))
            correction.backward(cross_entropy, *batch, index=i)
            assert (model.first.weight.grad is None) == (not model.first.weight.requires_grad)
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(first, model.first.weight)
    assert correction.report()["corrected_steps"] > 3


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in make_batches(3):
            yield from zip(x, y, strict=True)


@pytest.mark.parametrize("mode", ["recompute", "replay", "running"])
def test_loaders_of_all_kinds(mode: Any) -> None:
    """A DataLoader of lists, one without length, a generator, single tensors."""
    x, y = (torch.cat(parts) for parts in zip(*make_batches(3), strict=True))
    loaders: list[Any] = [DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(Stream(), batch_size=4)]
    found = []
    makers: list[Callable[[], Any]] = [
        lambda: loaders[0],
        lambda: loaders[1],
        lambda: (tuple(batch) for batch in loaders[0]),
    ]
    for make in makers:
        model = perceptron()
        correction = SVRG(mode=mode).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        correction.refresh(make(), cross_entropy)
        for batch in make():
            correction.backward(cross_entropy, *batch)
            optimizer.step()
            optimizer.zero_grad()
        found.append(vector_of(model))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_a_loader_of_single_tensors() -> None:
    """An autoencoder's batch is one argument, not as many as it has rows."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    data: DataLoader[Tensor] = DataLoader(torch.randn(16, 6), batch_size=4)  # type: ignore[arg-type]
    correction = Agent().attach(model)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x).square().mean()

    correction.refresh(data, loss_fn)
    for x in data:
        assert correction.backward(loss_fn, x).isfinite()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_weights_that_are_dropped_stay_zero_and_grown_ones_are_not_corrected(name: str) -> None:
    """Over many updates: the correction of an epoch changes only weights that were active at its snapshot."""
    batches = make_batches(6)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    topology = SET(sparsity=0.5, every=2, drop_fraction=0.4).attach(model, optimizer, 60)
    correction = ESTIMATORS[name].attach(model, topology)
    for _ in range(5):
        correction.refresh(batches, cross_entropy)
        at_snapshot = active_of(model, topology)
        for i, batch in enumerate(batches):
            now = active_of(model, topology)
            plain = torch.autograd.grad(cross_entropy(model, *batch), list(model.parameters()))
            before = np.concatenate([g.numpy().ravel() for g in plain])
            correction.backward(cross_entropy, *batch, index=i)
            found = np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])
            assert not found[~now].any()
            if name != "agent-mvr":  # whose snapshot is the last step
                grown = now & ~at_snapshot
                np.testing.assert_array_equal(found[grown], before[grown])
            optimizer.step()
            optimizer.zero_grad()
            assert not vector_of(model)[~active_of(model, topology)].any()
    assert topology.updates >= 10


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rigl_that_skips_its_update_steps(name: str) -> None:
    """The gradient is dense there and the step is not taken; masks, weights and the recursion must survive it."""
    batches = make_batches(6)
    model = perceptron()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    topology: Topology = RigL(sparsity=0.5, every=3, until=1.0).attach(model, optimizer, 60)
    correction = ESTIMATORS[name].attach(model, topology)
    for _ in range(4):
        correction.refresh(batches, cross_entropy)
        for i, batch in enumerate(batches):
            loss = correction.backward(cross_entropy, *batch, index=i)
            assert loss.isfinite()
            optimizer.step()
            optimizer.zero_grad()
            assert not vector_of(model)[~active_of(model, topology)].any()
    assert topology.updates == 8


def test_a_compiled_model() -> None:
    found = []
    for compiled in (False, True):
        model = perceptron()
        used: Any = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        SET(sparsity=0.5, every=3).attach(used, optimizer, 60)
        correction: Correction = Agent(gamma=0.9).attach(used)
        assert correction.topology is not None
        for _ in range(3):
            correction.refresh(make_batches(), cross_entropy)
            for batch in make_batches():
                correction.backward(cross_entropy, *batch)
                optimizer.step()
                optimizer.zero_grad()
        found.append(vector_of(model))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10)


def test_corrections_make_a_noisy_problem_less_noisy() -> None:
    """Least squares near the solution: SVRG and SAGA converge, SGD is held by its noise, MVR is in between."""
    torch.manual_seed(0)
    x = torch.randn(64, 8, dtype=torch.float64)
    y = x @ torch.randn(8, 1, dtype=torch.float64) + torch.randn(64, 1, dtype=torch.float64)
    best = torch.linalg.lstsq(x, y).solution
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    distance = {}
    for name, estimator in {
        "sgd": SVRG(coefficient=Fixed(0.0)),
        "svrg": SVRG(),
        "saga": SAGA(),
        "mvr": MVR(),
    }.items():
        model = nn.Linear(8, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        correction = estimator.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        random = np.random.default_rng(0)
        for _ in range(60):
            correction.refresh(batches, squares)
            for i in random.permutation(len(batches)).tolist():
                correction.backward(squares, *batches[i], index=i)
                optimizer.step()
                optimizer.zero_grad()
        distance[name] = float((model.weight.detach().T - best).norm())
    assert distance["svrg"] < 1e-6 * distance["sgd"]
    assert distance["saga"] < 1e-6 * distance["sgd"]
    assert distance["mvr"] < distance["sgd"]


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()
