"""Somebody's own loop with DistributedDataParallel: attaching notices it; BatchNorm over processes; the shares."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import equipoise as eq
from distributed_helpers import Processes, largest_difference, processes
from equipoise.correction import CORRECTIONS
from equipoise.data import Augment, Images, Loader
from equipoise.errors import UserError
from equipoise.topology import Algorithm
from equipoise.topology.packing import pack
from equipoise.training.sync_batchnorm import SyncedBatchNorm, synchronise
from equipoise.world import ALONE, World

STEPS, BATCH = 12, 16


@pytest.fixture
def two() -> Processes:
    return processes(2)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, BATCH, 10, generator=generator, dtype=torch.float64)
    return [(each, (each.sum(1) > 0).long()) for each in x]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def own_loop(world: World, topology: str, correction: str, mode: str) -> dict[str, Any]:
    """A loop as a user writes it, with DistributedDataParallel where there are several processes."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    model = network if world.alone else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    options = {"every": 5, "until": 1.0} if topology == "RigL" else {}
    sparse = getattr(eq, topology)(sparsity=0.7, **options).attach(model, optimizer, total_steps=STEPS)
    agent = CORRECTIONS[correction](**({"mode": mode} if mode else {})).attach(model)
    shares = [(x[world.rank :: world.size], y[world.rank :: world.size]) for x, y in batches()]
    losses = []
    for step in range(STEPS):
        if step % 6 == 0:
            agent.refresh(shares, loss_fn)
        losses.append(float(agent.backward(loss_fn, *shares[step % 6])))
        optimizer.step()
        optimizer.zero_grad()
    momentum = [optimizer.state[layer.parameter]["momentum_buffer"] for layer in sparse.layers]
    outside = [float(m[~layer.mask()].abs().sum()) for m, layer in zip(momentum, sparse.layers, strict=True)]
    weights = {name: p.detach() for name, p in network.named_parameters()}
    return {"weights": weights, "masks": sparse.masks, "losses": losses, "outside": outside}


@pytest.mark.parametrize(
    ("topology", "correction", "mode"),
    [
        ("RigL", "sgd", ""),
        ("RigL", "agent", "recompute"),
        ("RigL", "agent", "replay"),
        ("SNFS", "agent", "running"),
        ("Static", "mvr", ""),
    ],
)
def test_a_loop_with_ddp_is_that_of_one_process(two: Processes, topology: str, correction: str, mode: str) -> None:
    several = two(own_loop, topology, correction, mode)
    one = own_loop(ALONE, topology, correction, mode)
    weights = {name: value.numpy() for name, value in one["weights"].items()}
    for found in several:
        assert largest_difference(found["weights"], weights) < 1e-12
        assert all(np.array_equal(mask, one["masks"][name]) for name, mask in found["masks"].items())
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert found["outside"] == [0, 0]


STRUCTURED: dict[str, Algorithm] = {
    "RigL, 2:4": eq.RigL(sparsity=0.5, pattern="2:4", dense_first=True, every=3, until=1.0),
    "SRigL": eq.SRigL(sparsity=0.7, every=3, until=1.0, min_salience=0.9),
    "SR-STE": eq.SRSTE(pattern="2:4", dense_first=True),
}


def structured_loop(world: World, name: str) -> dict[str, Any]:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    model = network if world.alone else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    topology = STRUCTURED[name].attach(model, optimizer, total_steps=STEPS)
    masks = []
    for step in range(STEPS):
        x, y = batches()[step % 6]
        loss_fn(model, x[world.rank :: world.size], y[world.rank :: world.size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        masks.append(topology.masks)
    return {"weights": {key: p.detach() for key, p in network.named_parameters()}, "masks": masks}


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_pattern_is_that_of_one_process_on_every_rank(two: Processes, name: str) -> None:
    several, one = two(structured_loop, name), structured_loop(ALONE, name)
    weights = {key: value.numpy() for key, value in one["weights"].items()}
    assert any(not torch.equal(one["masks"][0][key], one["masks"][-1][key]) for key in one["masks"][0])
    for found in several:
        assert largest_difference(found["weights"], weights) < 1e-12
        for here, there in zip(one["masks"], found["masks"], strict=True):
            assert all(np.array_equal(mask, here[key]) for key, mask in there.items())


def loop_that_calls_backward(world: World, mode: str, calls_backward: bool) -> dict[str, Any]:
    """Two micro-batches a step; with `calls_backward` DistributedDataParallel averages at the second one only."""
    torch.manual_seed(3)
    layers = nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2)
    network = nn.Sequential(*layers).double()
    model = network if world.alone else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sparse = eq.RigL(sparsity=0.7, every=2, until=1.0, growth="corrected").attach(model, optimizer, total_steps=STEPS)
    agent = eq.Agent(gamma=0.8, mode=mode, coefficient={"name": "gradient"}).attach(model)
    synchronises = []  # whether the wrapper will synchronise buffers in the next pass: not after no_sync()
    for step in range(STEPS):
        mine = [(x[world.rank :: world.size], y[world.rank :: world.size]) for x, y in batches()]
        if step % 3 == 0:
            agent.refresh(mine, loss_fn)
        for part in (0, 1):
            batch = mine[2 * (step % 3) + part]
            if not calls_backward:
                agent.backward(loss_fn, *batch, scale=0.5)
                continue
            with model.no_sync() if part == 0 and not world.alone else nullcontext():
                (loss_fn(model, *batch) / 2).backward()
            agent.correct(loss_fn, *batch, scale=0.5)
            synchronises.append(model.require_forward_param_sync)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in network.named_parameters()}
    return {"weights": weights, "masks": sparse.masks, "report": agent.report(), "synchronises": synchronises}


@pytest.mark.parametrize("mode", ["recompute", "running"])
def test_correct_after_the_backward_pass_of_ddp(two: Processes, mode: str) -> None:
    ours, theirs = (two(loop_that_calls_backward, mode, own) for own in (False, True))
    for expected, found in zip(ours, theirs, strict=True):
        for name, mask in found["masks"].items():
            assert np.array_equal(mask, expected["masks"][name])
        assert found["report"] == pytest.approx(expected["report"], rel=1e-9)
        assert largest_difference(found["weights"], expected["weights"]) < 1e-12
        assert found["synchronises"] == [False, True] * STEPS


def without_correction(world: World) -> dict[str, Any]:
    """DistributedDataParallel averages the gradients itself; the topology alone is attached."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    model = network if world.alone else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sparse = eq.RigL(sparsity=0.7, every=4, until=1.0).attach(model, optimizer, total_steps=STEPS)
    hidden = []
    for step in range(STEPS):
        x, y = (part[world.rank :: world.size] for part in batches()[step % 6])
        loss_fn(model, x, y).backward()
        if not sparse.update_is_next:
            hidden += [float(layer.parameter.grad[~layer.mask()].abs().sum()) for layer in sparse.layers]
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": {n: p.detach() for n, p in network.named_parameters()},
        "masks": sparse.masks,
        "hidden": hidden,
    }


def test_a_topology_alone_works_with_ddp(two: Processes) -> None:
    one = without_correction(ALONE)
    weights = {name: value.numpy() for name, value in one["weights"].items()}
    for found in two(without_correction):
        assert largest_difference(found["weights"], weights) < 1e-12
        assert all(np.array_equal(mask, one["masks"][name]) for name, mask in found["masks"].items())
        assert set(found["hidden"]) == {0.0}


def accumulate(world: World) -> list[float]:
    """Two micro-batches a step, each averaged as it comes, and a parameter that only one process uses."""
    torch.manual_seed(3)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.seldom = nn.Linear(10, 2), nn.Linear(10, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.always(x) + (self.seldom(x) if world.rank == 0 else 0)

    model = Sometimes().double()
    wrapped = model if world.alone else DistributedDataParallel(model)
    agent = CORRECTIONS["svrg"](mode="recompute").attach(wrapped)
    shares = [(x[world.rank :: world.size], y[world.rank :: world.size]) for x, y in batches()]
    agent.refresh(shares, loss_fn)
    for share in shares[:2]:
        agent.backward(loss_fn, *share, scale=0.5)
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None for g in gradients)
    return [float(g.sum()) for g in gradients if g is not None] + [
        float(g.norm()) for g in gradients if g is not None
    ]


def test_gradients_accumulate_and_unused_parameters_are_filled_in(two: Processes) -> None:
    first, second = two(accumulate)
    assert first == second
    assert any(first)


def buffers_of(world: World) -> dict[str, Any]:
    """DistributedDataParallel still shares the first process's running statistics before each live pass."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = DistributedDataParallel(network)
    agent = CORRECTIONS["agent"](mode="recompute").attach(model)
    shares = [(x[world.rank :: 2], y[world.rank :: 2]) for x, y in batches()]
    agent.refresh(shares, loss_fn)
    for share in shares:
        agent.backward(loss_fn, *share)
    before = network[1].running_mean.clone()  # of this process's last images
    agent.backward(loss_fn, *shares[0])
    momentum = network[1].momentum
    own = network[0](shares[0][0]).mean(0)
    return {"basis": ((network[1].running_mean - momentum * own) / (1 - momentum)).detach(), "before": before}


def test_running_statistics_are_shared_as_ever(two: Processes) -> None:
    first, second = two(buffers_of)
    assert not np.allclose(first["before"], second["before"])
    assert np.allclose(first["basis"], first["before"])
    assert np.allclose(second["basis"], first["before"])


def attach_packed(world: World, dynamic: bool) -> str:
    algorithm = eq.SET(sparsity=0.7, every=2) if dynamic else eq.Static(sparsity=0.7)
    model = DistributedDataParallel(pack(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)), algorithm))
    try:
        algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=10)
    except UserError as error:
        return str(error)
    return ""


def test_packed_weights_that_change_their_length_are_refused_under_ddp(two: Processes) -> None:
    assert two(attach_packed, False) == ["", ""]
    assert all("DistributedDataParallel" in line and "masked" in line for line in two(attach_packed, True))


# BatchNorm over processes

SHAPES = {"images": (7, 3, 4, 4), "vectors": (9, 3), "rows": (5, 3, 6)}
NORMS: dict[str, Any] = {"images": nn.BatchNorm2d, "vectors": nn.BatchNorm1d, "rows": nn.BatchNorm1d}


def normalise(world: World, kind: str, momentum: float | None, affine: bool) -> dict[str, Any]:
    """Output, gradients and running statistics of this process's share after two batches."""
    torch.manual_seed(1)
    norm = NORMS[kind](3, momentum=momentum, affine=affine).double()
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model = synchronise(nn.Sequential(norm), world)
    outputs, slopes = [], []
    for _ in range(2):
        whole = torch.randn(SHAPES[kind], dtype=torch.float64) * 3 + 1000
        slope = torch.randn(SHAPES[kind], dtype=torch.float64)
        x = whole[world.rank :: world.size].clone().requires_grad_()
        y = model(x)
        (y * slope[world.rank :: world.size]).sum().backward()
        outputs.append(y.detach())
        slopes.append(x.grad)
    parameters = {name: world.all_reduce(p.grad) for name, p in model.named_parameters()}
    return {"y": outputs, "dx": slopes, "parameters": parameters, "buffers": dict(model.named_buffers())}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, True), (0.3, False)])
def test_batchnorm_is_that_of_the_whole_batch(
    two: Processes, kind: str, momentum: float | None, affine: bool
) -> None:
    one = normalise(ALONE, kind, momentum, affine)
    several = two(normalise, kind, momentum, affine)
    for rank, found in enumerate(several):
        for part in ("y", "dx"):
            for mine, whole in zip(found[part], one[part], strict=True):
                assert np.allclose(mine, whole[rank::2], rtol=0, atol=1e-10)
        for part in ("parameters", "buffers"):
            assert found[part].keys() == one[part].keys()
            assert all(np.allclose(v, one[part][name], rtol=1e-10) for name, v in found[part].items())


def test_a_synchronised_norm_keeps_names_and_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    keys, weight = list(model.state_dict()), model[1].weight
    synchronise(model, World(0, 2))
    assert isinstance(model[1], SyncedBatchNorm)
    assert list(model.state_dict()) == keys
    assert model[1].weight is weight
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(model[1].eval()(x), nn.BatchNorm2d(3).eval()(x))


# Shares of batches


@pytest.mark.parametrize("fixed", [False, True])
def test_the_shares_of_a_batch_make_up_the_batch_with_its_augmentation(fixed: bool) -> None:
    pixels = torch.arange(23 * 9, dtype=torch.int64).remainder(251).to(torch.uint8).view(23, 1, 3, 3)
    images = Images(pixels, torch.arange(23))
    options: dict[str, Any] = {"batch": 5, "seed": 4, "augment": Augment(pad=1), "fixed_batches": fixed}
    whole = Loader(images, **options)
    shares = [Loader(images, **options, rank=rank, ranks=3) for rank in range(3)]
    for epoch in (0, 2):
        for i, (x, y) in enumerate(whole.epoch(epoch)):
            parts = [share.batch(epoch, i) for share in shares]
            for rank, (own, labels) in enumerate(parts):
                assert torch.equal(own, x[rank::3])
                assert torch.equal(labels, y[rank::3])
            assert all(share.order.size(epoch, i) == len(y) for share in shares)
