"""A small problem, and a loop without any framework that solves it, for tests of the framework integrations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import equipoise as eq

FEATURES, BATCH, BATCHES, EPOCHS = 10, 8, 6, 4
RATE, CLIP = 0.5, 0.1

CORRECTIONS = {
    "none": None,
    "agent": eq.Agent(gamma=1.0),
    "replay": eq.Agent(gamma=1.0, mode="replay", coefficient="gradient"),
    "running": eq.Agent(gamma=1.0, mode="running"),
    "every": eq.SVRG(every=BATCHES),
}


def topology(**options: Any) -> eq.RigL:
    return eq.RigL(sparsity=0.7, every=3, until=1.0, **options)


def data() -> TensorDataset:
    x = torch.randn(BATCH * BATCHES, FEATURES, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(FEATURES, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 2))
    return nn.Sequential(*layers).double()


def loss_fn(outer: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outer.model(x), y)


def own_loop(model: nn.Module, correction: Any, accumulated: int) -> tuple[dict[str, Tensor], eq.Topology]:
    """Train as a user does without a framework: SGD with momentum, clipped gradients, accumulated batches.

    `model.model` is the network. The names of the weights count: they seed the masks.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    sparse = topology().attach(model, optimizer, total_steps=EPOCHS * BATCHES // accumulated)
    agent = (correction or eq.SGD()).attach(model, sparse, total_steps=EPOCHS * BATCHES)
    x, y = data().tensors
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    for _ in range(EPOCHS):
        agent.refresh(batches, loss_fn)
        for i, batch in enumerate(batches, 1):
            agent.backward(loss_fn, *batch, scale=1 / accumulated)
            if i % accumulated == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return weights(model), sparse


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The tensors are bit-identical."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of the frameworks, but not ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(lightning|pytorch_lightning|transformers|accelerate|torch)\..*")
        yield
