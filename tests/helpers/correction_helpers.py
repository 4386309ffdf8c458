"""Helpers of the correction tests: a model and a loader that draw random numbers, and comparisons."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from equipoise.correction import Correction, Estimator
from equipoise.topology import SET, Topology


class Noisy(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))


class Augmented(Dataset[tuple[Tensor, int]]):
    """Inputs with augmentation from all three global generators, as in many users' datasets."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(i))
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return inputs + 0.1 * noise, i % 3


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def streams() -> list[Any]:
    """One number from each global generator, which then keeps its state."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: NPY002
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    return drawn


def loader() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=8, shuffle=True)


def attached(
    estimator: Estimator, momentum: float = 0.9
) -> tuple[Noisy, torch.optim.Optimizer, Topology, Correction]:
    seed_all(1)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3)
    topology = SET(sparsity=0.5, every=4).attach(model, optimizer, 60)
    return model, optimizer, topology, estimator.attach(model, topology, total_steps=30)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of everything that a pass could change."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [copy.deepcopy(model.state_dict()), gradients, copy.deepcopy(optimizer.state_dict()), streams()]


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right
