"""A user's loop with `fully_shard` (FSDP2): it trains as one process does, and its checkpoints fit any number."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import equipoise as eq
from distributed_helpers import largest_difference, processes
from equipoise.errors import UserError
from equipoise.topology.packing import pack
from equipoise.world import ALONE, World

STEPS, BATCH = 14, 16

ALGORITHMS: dict[str, dict[str, Any]] = {
    "Static": {},
    "SET": {"every": 3},
    "RigL": {"every": 3, "until": 1.0},
    "SRigL": {"every": 3, "until": 1.0, "min_salience": 0.9},
    "SNFS": {"every": 3},
    "MEST": {"every": 3},
    "GMP": {"every": 3},
    "GraNet": {"every": 3},
}


def network() -> nn.Sequential:
    """Layers of 5, 1, 3 and 2 outputs: processes hold different numbers of rows, and some hold all or none."""
    torch.manual_seed(3)
    convolutions = (nn.Conv2d(1, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 1, 3, padding=1), nn.Flatten())
    return nn.Sequential(*convolutions, nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(6, BATCH, 1, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [(each, (each.sum((1, 2, 3)) > 0).long()) for each in x]


def shard(model: nn.Sequential, mesh: DeviceMesh | None = None) -> None:
    for module in (model[0], model[4], model):
        fully_shard(module, mesh=mesh)


class Run:
    """A loop as a user writes it; without peers it is that of one process."""

    def __init__(
        self, world: World, name: str, optimizer: str = "SGD", attach: str = "after", device: str = "cpu"
    ) -> None:
        self.world = world
        self.device = device
        self.model = network().to(device)
        algorithm = getattr(eq, name)(sparsity=0.7, **ALGORITHMS[name])
        options: dict[str, Any] = {"lr": 0.2, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01}

        def build() -> torch.optim.Optimizer:
            return getattr(torch.optim, optimizer)(self.model.parameters(), **options)

        if attach == "before":
            topology = algorithm.attach(self.model, build(), total_steps=STEPS)
        if not world.alone:
            shard(self.model)
        self.optimizer = build()
        if attach == "before":
            self.topology = topology
            self.topology.reattach(self.optimizer)
        else:
            self.topology = algorithm.attach(self.model, self.optimizer, total_steps=STEPS)
        self.ema = eq.EMA(self.model, decay=0.8)

    def take(self, steps: range, passes: int = 1, clip: float = 0.0) -> None:
        for step in steps:
            x, y = (part[self.world.rank :: self.world.size].to(self.device) for part in batches()[step % 6])
            for part in range(passes):
                loss = cross_entropy(self.model(x[part::passes]), y[part::passes])
                (loss / passes).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update()

    def found(self) -> dict[str, Any]:
        x = batches()[0][0].to(self.device)
        with self.ema.applied(), torch.no_grad():
            averaged = self.model(x)
        with torch.no_grad():
            live = self.model(x)
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        weights = {name: whole(p) for name, p in self.model.named_parameters()}
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        moments = {f"{i} {key}": whole(v) for i, s in enumerate(states) for key, v in s.items()}
        return {
            "weights": weights | moments | {"averaged": averaged, "live": live},
            "masks": self.topology.masks,
            "counts": [layer.active for layer in self.topology.layers],
            "updates": self.topology.updates,
            "exploration": self.topology.exploration,
            "steps": self.topology.steps,
        }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()  # type: ignore[operator]


def loop(
    world: World, name: str, optimizer: str, attach: str, passes: int, clip: float, device: str = "cpu"
) -> dict[str, Any]:
    run = Run(world, name, optimizer, attach, device)
    run.take(range(STEPS), passes, clip)
    return run.found()


def assert_equal(several: list[dict[str, Any]], one: dict[str, Any]) -> None:
    expected = {name: value.numpy() for name, value in one["weights"].items()}
    masks = {name: mask.numpy() for name, mask in one["masks"].items()}
    for found in several:
        assert all(np.array_equal(mask, found["masks"][name]) for name, mask in masks.items())
        assert largest_difference(found["weights"], expected) < 1e-10
        assert [int(mask.sum()) for mask in found["masks"].values()] == found["counts"] == one["counts"]
        for name, mask in masks.items():
            assert not found["weights"][name][~mask].any()
        for key in ("updates", "steps", "exploration"):
            assert found[key] == one[key]


CASES = [
    ("RigL", "SGD", "after", 1, 0.0),
    ("RigL", "Adam", "before", 2, 0.1),
    ("SNFS", "SGD", "before", 2, 0.1),
]
MORE = [
    (name, optimizer, attach, 1 + (attach == "after"), 0.1)
    for name in ALGORITHMS
    for optimizer, attach in (("SGD", "after"), ("Adam", "before"))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_equal_one(case: tuple[Any, ...]) -> None:
    several, one = processes(2)(loop, *case), loop(ALONE, case[0], case[1], "after", *case[3:])
    assert one["updates"] >= 3
    assert_equal(several, one)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", MORE, ids=str)
def test_every_topology_equals_one_process(count: int, case: tuple[Any, ...]) -> None:
    assert_equal(processes(count)(loop, *case), loop(ALONE, case[0], case[1], "after", *case[3:]))


def replicated(world: World, name: str) -> dict[str, Any]:
    """Two replicas of a model that two processes each share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with mock.patch.dict(globals(), {"shard": partial(shard, mesh=mesh)}):
        return loop(world, name, "SGD", "after", 2, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RigL", "SNFS"])
def test_replicas_of_sharded_models_equal_one_process(name: str) -> None:
    assert_equal(processes(4)(replicated, name), loop(ALONE, name, "SGD", "after", 2, 0.1))


# Checkpoints


def save(world: World, folder: str, name: str, after: int) -> None:
    run = Run(world, name)
    run.take(range(after))
    dcp.save(state_of(run), checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole_state = {
        "model": get_model_state_dict(run.model, options=full),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=full),
        "topology": run.topology.state_dict(),
        "ema": {"steps": run.ema.steps, "values": {n: whole(v) for n, v in run.ema.values.items()}},
    }
    if world.leads:
        torch.save(whole_state, f"{folder}.pt")


def state_of(run: Run) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        "topology": run.topology.state_dict(),
        "ema": run.ema.state_dict(),
    }


def resume(world: World, folder: str, name: str, after: int, kind: str) -> dict[str, Any]:
    run = Run(world, name)
    if kind == "distributed":
        state, options = state_of(run), None
        assert run.topology.steps == 0  # the optimizer's state is made by a step that does not count
        dcp.load(state, checkpoint_id=folder)
    else:
        state = torch.load(f"{folder}.pt")
        options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(run.model, state["model"], options=options)
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=options)
    run.topology.load_state_dict(state["topology"])
    run.ema.load_state_dict(state["ema"])
    run.take(range(after, STEPS))
    return run.found()


@pytest.mark.parametrize(
    ("name", "kind", "before", "later"),
    [
        ("SNFS", "distributed", 2, 1),
        ("RigL", "full", 1, 2),
        pytest.param("SNFS", "distributed", 4, 2, marks=pytest.mark.slow),
        pytest.param("RigL", "distributed", 2, 4, marks=pytest.mark.slow),
        pytest.param("GraNet", "full", 4, 1, marks=pytest.mark.slow),
        pytest.param("SNFS", "full", 1, 4, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_on_another_number_of_processes(
    tmp_path: Path, name: str, kind: str, before: int, later: int
) -> None:
    folder, after = str(tmp_path / "checkpoint"), 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on checkpoints of one process
        on(before, save, folder, name, after)
        resumed = on(later, resume, folder, name, after, kind)
    whole_run = Run(ALONE, name)
    whole_run.take(range(STEPS))
    assert_equal(resumed if later > 1 else [plainly(resumed[0])], whole_run.found())


def on(count: int, task: Any, *arguments: Any) -> list[Any]:
    return [task(ALONE, *arguments)] if count == 1 else processes(count)(task, *arguments)


def plainly(found: dict[str, Any]) -> dict[str, Any]:
    parts = {part: {name: value.numpy() for name, value in found[part].items()} for part in ("weights", "masks")}
    return found | parts


# Refusals


def complaints(world: World) -> list[str]:
    """The messages of everything that does not work with `fully_shard`."""
    found = []

    def refused(work: Any) -> None:
        with pytest.raises(UserError) as error:
            work()
        found.append(str(error.value))

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = network()
    shard(model)
    refused(lambda: eq.BSRNet(sparsity=0.7, distribution="erk").attach(model, sgd(model)))
    refused(lambda: eq.SRSTE(pattern="fan_in").attach(model, sgd(model)))
    refused(lambda: eq.Agent().attach(model))
    partly = network()
    fully_shard(partly[4])
    refused(lambda: eq.Static(sparsity=0.7).attach(partly, sgd(partly)))
    packed = pack(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)), eq.SET(sparsity=0.7))
    attached = eq.SET(sparsity=0.7).attach(packed, sgd(packed), total_steps=999)
    fully_shard(packed)
    refused(lambda: attached.optimizer.step())
    refused(lambda: attached.reattach(sgd(packed)))
    refused(lambda: eq.SET(sparsity=0.7).attach(packed, sgd(packed), total_steps=999))
    late = network()
    topology = eq.SET(sparsity=0.7).attach(late, sgd(late), total_steps=9)
    refused(lambda: topology.reattach(sgd(late)))
    agent = eq.Agent().attach(late)
    topology = eq.Topology.of(late) or eq.SET(sparsity=0.7).attach(late, sgd(late), total_steps=9)
    shard(late)
    refused(lambda: topology.masks)
    refused(lambda: topology.optimizer.step())
    refused(lambda: agent.backward(lambda m, x: m(x).sum(), batches()[0][0]))
    refused(lambda: topology.reattach(topology.optimizer))
    topology.reattach(sgd(late))  # a refusal changes nothing
    assert topology.attached
    return found


def test_what_does_not_work_is_refused_by_name() -> None:
    first, second = processes(2)(complaints)
    assert first == second
    assert all("\n" not in line for line in first)
    words = [
        "BSR-Net", "SR-STE", "correction", '"0.weight" is not sharded', "packed weights", "packed weights",
        "packed weights", "was not sharded",
        "topology.reattach(optimizer)", "topology.reattach(optimizer)", "correction", 'does not have "0.weight"',
    ]  # fmt: skip
    assert len(first) == len(words)
    for line, word in zip(first, words, strict=True):
        assert word in line
