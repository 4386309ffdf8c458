"""What growth looks at in packed storage, judged by masked storage and by dense torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise.sparse import pack
from equipoise.storage.packed import PackedWeight
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology import SET, SNFS, Dynamic, GraNet, RigL, Topology

STEPS = 30


@dataclass(frozen=True, kw_only=True)
class Downhill(SET):
    """SET that grows where the gradient is most negative."""

    dense_gradient: ClassVar[Literal["never", "at updates", "always"]] = "at updates"

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        assert layer.gradient is not None
        return -layer.gradient


@dataclass(frozen=True, kw_only=True)
class OneSided(RigL):
    """RigL that grows where the gradient is most positive."""

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        assert layer.gradient is not None
        return layer.gradient


class Uphill:
    """Growth that comes in from beside the algorithm."""

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        assert layer.gradient is not None
        return layer.gradient


@dataclass(frozen=True, kw_only=True)
class Mixed(Uphill, GraNet):  # type: ignore[misc]
    """GraNet that is not by magnitude, though nothing in it says so."""


def network() -> nn.Module:
    """Without a kink, at which a difference of rounding would become one of a thousandth."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
    return nn.Sequential(conv, norm, nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def without_dense_parameters() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48, bias=False), nn.Tanh(), nn.Linear(48, 10, bias=False))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(count)
    ]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


Step = Callable[[nn.Module, torch.optim.Optimizer, Topology, list[tuple[Tensor, Tensor]]], None]


def both(algorithm: Dynamic, step: Step, net: Callable[[], nn.Module] = network, micro: int = 1) -> list[Topology]:
    """The same training in both storages; every step has so many micro-batches."""
    trained = []
    for packed in (False, True):
        model = pack(net(), algorithm) if packed else net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        topology = algorithm.attach(model, optimizer, STEPS)
        data = batches(STEPS * micro)
        for number in range(STEPS):
            step(model, optimizer, topology, data[number * micro : (number + 1) * micro])
        trained.append(topology)
    assert [topology.storage for topology in trained] == ["masked", "packed"]
    return trained


def assert_same_masks(masked: Topology, packed: Topology, updates: int) -> None:
    assert masked.updates == packed.updates == updates
    for name, mask in masked.masks.items():
        assert torch.equal(packed.masks[name], mask), name


def accumulated(set_to_none: bool = True) -> Step:
    def step(model: nn.Module, optimizer: Any, _: Topology, data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data:
            (loss_fn(model, x, y) / len(data)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)

    return step


@pytest.mark.parametrize("algorithm", [Downhill, OneSided, Mixed, RigL, GraNet])
def test_growth_by_any_score_is_the_same_in_both_storages(algorithm: type[Dynamic]) -> None:
    masked, packed = both(algorithm(sparsity=0.9, every=5, until=1.0), accumulated())
    assert_same_masks(masked, packed, 5)


class Reads(nn.Module):
    """A forward that takes the weight of a layer: instead of calling it, and beside calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x.flatten(1), self.first.weight, self.first.bias).tanh()
        x = self.second(x).tanh() + F.linear(x, self.second.weight.t()).sin()
        penalty = 0.01 * self.head.weight.square().mean() + 0 * self.first.weight.detach().sum()
        return self.head(x) * (1 + penalty)


def reads() -> nn.Module:
    torch.manual_seed(0)
    return Reads()


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("algorithm", [Downhill, RigL, GraNet, SNFS])
def test_growth_sees_the_gradient_of_a_weight_that_a_forward_reads(algorithm: type[Dynamic], micro: int) -> None:
    masked, packed = both(algorithm(sparsity=0.8, every=5, until=1.0), accumulated(), reads, micro)
    assert_same_masks(masked, packed, 5)


def test_the_example_for_contributors_runs_as_printed() -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / "algorithm.md").read_text(encoding="utf-8")
    (algorithm,) = re.findall(r"```python\n(.*?class GrowBySign.*?)\n\n\ntopology =", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(algorithm, names)
    masked, packed = both(names["GrowBySign"](sparsity=0.9, every=5), accumulated())
    assert_same_masks(masked, packed, 5)


# Several backward passes in one step


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("algorithm", [RigL, SNFS])
@pytest.mark.parametrize("net", [network, without_dense_parameters])
def test_growth_sees_the_sum_over_micro_batches(algorithm: type[Dynamic], net: Any, set_to_none: bool) -> None:
    options: dict[str, Any] = {"sparsity": 0.9, "every": 5, "until": 1.0, "step_at_update": "take"}
    masked, packed = both(algorithm(**options), accumulated(set_to_none), net, micro=4)
    assert_same_masks(masked, packed, 5)


@pytest.mark.parametrize("every", [1, 5])
def test_growth_sees_the_sum_from_the_first_step_on(every: int) -> None:
    """When nothing has told yet that there are several passes."""
    algorithm = RigL(sparsity=0.9, every=every, until=1.0, step_at_update="take")
    masked, packed = both(algorithm, accumulated(), micro=3)
    assert_same_masks(masked, packed, (STEPS - 1) // every)


def corrected(set_to_none: bool) -> Step:
    """AGENT on micro-batches: passes at its snapshot are none of the step's."""
    attached: dict[int, Any] = {}

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, topology: Topology, data: list[tuple[Tensor, Tensor]]
    ) -> None:
        if topology.steps % 10 == 0:
            if topology.steps == 0:
                attached[id(topology)] = eq.Agent().attach(model, topology)
            attached[id(topology)].refresh(batches(6), loss_fn)
        for x, y in data:
            attached[id(topology)].backward(loss_fn, x, y, scale=1 / len(data))
        optimizer.step()
        optimizer.zero_grad(set_to_none)

    return step


@pytest.mark.parametrize("set_to_none", [True, False])
def test_growth_sees_no_pass_of_a_correction(set_to_none: bool) -> None:
    masked, packed = both(RigL(sparsity=0.9, every=5, until=1.0), corrected(set_to_none), micro=4)
    assert_same_masks(masked, packed, 5)


def one_layer(algorithm: Dynamic) -> tuple[nn.Module, torch.optim.Optimizer, PackedWeight]:
    torch.manual_seed(0)
    model = pack(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)), algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (layer,) = algorithm.attach(model, optimizer, STEPS).layers
    assert isinstance(layer, PackedWeight)
    return model, optimizer, layer


def dense_gradient(layer: PackedWeight, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Torch's own, of the dense layer in float64."""
    weight = layer.weight.view(7, 12).double().requires_grad_()
    bias = next(p for n, p in model.named_parameters() if n.endswith("bias")).detach().double()
    return torch.autograd.grad(loss(weight, bias), weight)[0].reshape(-1).float()


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("zero", [None, True, False])
def test_passes_add_up_until_gradients_are_cleared(density: float, zero: bool | None) -> None:
    model, optimizer, layer = one_layer(SNFS(sparsity=0.4, every=3, distribution={"*": density}))
    x, other = torch.randn(9, 12), torch.randn(9, 12)
    model(x).square().sum().backward()
    if zero is not None:
        optimizer.zero_grad(set_to_none=zero)  # the step is not taken
    (model(x).square().sum() + model(other).pow(3).sum()).backward()  # the layer twice, as in TRADES
    torch.autograd.grad(model(x).sum(), list(model.parameters()))  # a measurement
    before = 1 if zero is None else 0

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        first = F.linear(x.double(), weight, bias).square().sum()
        return (1 + before) * first + F.linear(other.double(), weight, bias).pow(3).sum()

    assert layer.gradient is not None
    torch.testing.assert_close(layer.gradient, dense_gradient(layer, model, loss), rtol=1e-4, atol=1e-4)


def test_a_use_without_a_backward_pass_hides_nothing() -> None:
    """A checkpointed part runs forward twice, an attack's passes may be thrown away."""
    model, _, layer = one_layer(SNFS(sparsity=0.4, every=3))
    x = torch.randn(9, 12)
    model(x)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x.double(), weight, bias).square().sum()

    assert layer.gradient is not None
    torch.testing.assert_close(layer.gradient, dense_gradient(layer, model, loss), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", [RigL, GraNet])
def test_the_number_of_passes_may_vary_from_step_to_step(algorithm: type[Dynamic]) -> None:
    """Accumulation with a short last group, which may fall on an update."""

    def step(model: nn.Module, optimizer: Any, topology: Topology, data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data[: 1 + topology.steps % 3]:
            loss_fn(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    masked, packed = both(algorithm(sparsity=0.9, every=5, until=1.0, step_at_update="take"), step, micro=3)
    assert_same_masks(masked, packed, 5)


def test_gradients_of_inactive_weights_are_held_only_at_updates() -> None:
    model, optimizer, layer = one_layer(RigL(sparsity=0.7, every=3))
    for step in range(1, 8):
        model(torch.randn(9, 12)).square().sum().backward()
        assert (layer.growth is not None) == (step % 3 == 0)
        optimizer.step()
        optimizer.zero_grad()
        assert layer.growth is None
