"""What the topology tests share: tiny models, one training step, and what must hold after every step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.topology import ALGORITHMS, Topology
from equipoise.topology.algorithm import Dynamic

# Algorithms with a pattern of their own have other counts, HYDRA begins dense; they have tests of their own.
UNSTRUCTURED = {name: kind for name, kind in ALGORITHMS.items() if not kind.pattern and name != "hydra"}
DYNAMIC = {name: kind for name, kind in UNSTRUCTURED.items() if issubclass(kind, Dynamic)}
SPARSE = [name for name in UNSTRUCTURED if name != "dense"]


class Perceptron(nn.Module):
    def __init__(self, bias: bool, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24, bias)
        self.last = nn.Linear(24, classes, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


Made = tuple[Perceptron, torch.optim.Optimizer, Topology]


def perceptron(bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32, classes: int = 5) -> Perceptron:
    torch.manual_seed(seed)
    return Perceptron(bias, classes).to(dtype)


def convnet(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    conv, norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
    return nn.Sequential(conv, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def make(algorithm: str, total: int = 40, dtype: torch.dtype = torch.float32, **options: Any) -> Made:
    """A perceptron at 70 % sparsity, SGD with all that could revive a weight, and updates at every third step."""
    model = perceptron(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return model, optimizer, attach(algorithm, model, optimizer, total, **{"sparsity": 0.7, **options})


def attach(
    algorithm: str, model: nn.Module, optimizer: torch.optim.Optimizer, total: int, **options: Any
) -> Topology:
    """By name; updates at every third step unless said otherwise, where there are any at fixed steps."""
    if algorithm in DYNAMIC:
        options = {"every": 3, **options}
    else:
        options.pop("every", None)
    if algorithm == "bsr-net":
        options = {"distribution": "erk", **options}  # its own densities are known for a few models only
    return ALGORITHMS[algorithm](**options).attach(model, optimizer, total)


def batch(step: int, size: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The same inputs and labels every time a step is asked for."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 12, generator=generator).to(dtype)
    return inputs, torch.randint(5, (size,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Plain steps with a closure, which is what every optimizer accepts."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        inputs, labels = batch(step, dtype=dtype)

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).float(), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


def backward(model: nn.Module, step: int) -> Tensor:
    inputs, labels = batch(step, dtype=next(model.parameters()).dtype)
    loss = F.cross_entropy(model(inputs).float(), labels)
    loss.backward()
    return loss


def assert_sparse(topology: Topology) -> None:
    """Inactive weights are exactly zero, and the counts on the host are those of the masks."""
    for layer in topology.layers:
        assert torch.count_nonzero(layer.parameter.detach()[~layer.mask()]) == 0, layer.name
        assert int(layer.mask().sum()) == layer.active, layer.name


def assert_same_tensors(left: nn.Module, right: nn.Module) -> None:
    assert left.state_dict().keys() == right.state_dict().keys()
    for name, tensor in left.state_dict().items():
        assert torch.equal(tensor, right.state_dict()[name]), name
