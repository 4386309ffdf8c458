"""Model, optimizer, topology and agent are loaded in any order: the result is the saved state, or an error."""

from __future__ import annotations

import copy
import io
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq
from correction_helpers import assert_same
from equipoise.errors import UserError
from equipoise.topology import ALGORITHMS

ALGORITHM_NAMES = ["static", "rigl", "snfs", "gmp", "bsr-net"]
ORDERS = list(itertools.permutations(range(4)))  # of model, optimizer, topology, agent
FEW_ORDERS = [(0, 1, 2, 3), (1, 3, 0, 2), (2, 0, 3, 1), (3, 2, 1, 0)]  # each part directly before every other one
Run = tuple[nn.Module, torch.optim.Optimizer, eq.Topology, Any]
SAVED, LATER = 7, 10  # steps


def loss_fn(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(6)]


def make(name: str, storage: str, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"distribution": "erk"} if name == "bsr-net" else {"every": 2}
    algorithm = ALGORITHMS[name](sparsity=0.7, **({} if name == "static" else options))
    model: nn.Module = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    if storage == "packed":
        model = eq.sparse.pack(model, algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    topology = algorithm.attach(model, optimizer, total_steps=40)
    return model, optimizer, topology, eq.Agent(gamma=0.8).attach(model, topology)


def train(run: Run, steps: range, seed: int = 0) -> None:
    _, optimizer, _, agent = run
    for step in steps:
        if step % 6 == 0:
            agent.refresh(batches(), loss_fn)
        inputs, labels = batches()[step % 6]
        optimizer.zero_grad()
        agent.backward(loss_fn, inputs + seed, labels)
        optimizer.step()


def state(run: Run) -> list[Any]:
    return [copy.deepcopy(part.state_dict()) for part in run]


def load(run: Run, saved: list[Any], order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    loaded = copy.deepcopy(saved)  # an optimizer keeps the tensors that it is given
    for i in order:
        run[i].load_state_dict(loaded[i])


def through_a_file(saved: list[Any]) -> list[Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("name", "storage", "orders"),
    [
        *((name, "masked", FEW_ORDERS) for name in ALGORITHM_NAMES if name != "rigl"),
        ("rigl", "masked", ORDERS),
        ("rigl", "packed", FEW_ORDERS),
        ("bsr-net", "packed", ORDERS),
    ],
)
def test_all_orders_give_the_saved_state(name: str, storage: str, orders: list[tuple[int, ...]]) -> None:
    """Into a fresh model with other weights, and again after training has moved the weights."""
    whole = make(name, storage)
    train(whole, range(SAVED))
    saved = state(whole)
    train(whole, range(SAVED, LATER))
    expected = state(whole)
    fresh, loaded = make(name, storage, seed=5), through_a_file(saved)
    for order in orders:
        other = copy.deepcopy(fresh)
        load(other, loaded, order)
        assert_same(state(other), saved)
        train(other, range(SAVED, LATER), seed=1)
        load(other, loaded, order)
        load(other, loaded, order)
        train(other, range(SAVED, LATER))
        assert_same(state(other), expected)


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_weights_that_are_loaded_before_attaching_are_kept(name: str) -> None:
    """As frameworks resume a run."""
    whole = make(name, "masked")
    train(whole, range(SAVED))
    saved = state(whole)
    model: nn.Module = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    model.load_state_dict(saved[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    topology = whole[2].algorithm.attach(model, optimizer, total_steps=40)
    other = model, optimizer, topology, eq.Agent(gamma=0.8).attach(model, topology)
    load(other, saved, (1, 2, 3))
    assert_same(state(other), saved)
    for run in (whole, other):
        train(run, range(SAVED, LATER))
    assert_same(state(other), state(whole))


def test_weights_that_were_lost_in_attaching_are_refused() -> None:
    """With a random mask by name."""
    whole = make("rigl", "masked")
    saved = state(whole)
    model: nn.Module = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    model.load_state_dict(saved[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    algorithm = replace(whole[2].algorithm, initial_mask="random", seed=1)
    topology = algorithm.attach(model, optimizer, total_steps=40)
    other = model, optimizer, topology, eq.Agent(gamma=0.8).attach(model, topology)
    load(other, saved, (1, 2, 3))
    with pytest.raises(UserError, match="load the model, the optimizer and the topology of one checkpoint"):
        train(other, range(1))
    load(other, saved)
    train(other, range(2))


@pytest.mark.parametrize("storage", ["masked", "packed"])
@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_a_topology_without_its_model_is_refused(name: str, storage: str) -> None:
    run = make(name, storage)
    train(run, range(SAVED))
    saved = state(run)
    train(run, range(SAVED, LATER))
    run[2].load_state_dict(saved[2])
    with pytest.raises(UserError) as error:
        train(run, range(SAVED, LATER))
    assert str(error.value) == (
        '"0.weight" does not have the values of the loaded topology; '
        "load the model, the optimizer and the topology of one checkpoint, after attaching"
    )
    for i in (0, 1, 3):
        run[i].load_state_dict(saved[i])
    assert_same(state(run)[2], saved[2])
