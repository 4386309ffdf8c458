"""Decisions that a forward takes in Python are taken at every call, and not once when it is traced."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from equipoise.deploy.frozen import Frozen, freeze
from equipoise.kernels import library
from equipoise.storage.pack import unpack
from equipoise.topology.packing import pack
from sparse_helpers import masks, packed_model

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


# -- tracing


class Small(nn.Module):
    """A convolution, the steps of a subclass, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(0.0))
        self.plain = torch.tensor(3.0)
        self.steps, self.seen = 0, None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.norm(self.conv(x)).relu()).mean((2, 3)))

    def between(self, x: Any) -> Any:
        return x


class FunctionalDropout(Small):
    def between(self, x: Any) -> Any:
        return F.dropout(x, 0.5, self.training)


class TrainBranch(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if self.training else x


class NormBranch(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if self.norm.training else x


class Attention(Small):
    def between(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)


class TorchDepth(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if torch.rand(()).item() < 0.5 else x


class PythonDepth(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if random.random() < 0.5 else x


class NumpyDepth(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if np.random.rand() < 0.5 else x  # noqa: NPY002


class ReadsWeight(Small):
    def between(self, x: Any) -> Any:
        return x * self.conv.weight.abs().sum()


class MakesTensor(Small):
    def between(self, x: Any) -> Any:
        return x * (self.scale * 2)


class Counts(Small):
    def between(self, x: Any) -> Any:
        self.steps += 1
        return x * 2 if self.steps > 1 else x


class CountsInBuffer(Small):
    def between(self, x: Any) -> Any:
        self.count.add_(1)  # type: ignore[operator]
        return x * self.count


class ScalesBuffer(Small):
    """The write does not change the value while the buffer is zero."""

    def between(self, x: Any) -> Any:
        self.count.mul_(2)  # type: ignore[operator]
        return x + self.count


class CountsInData(Small):
    def between(self, x: Any) -> Any:
        self.count.data += 1  # type: ignore[operator]
        return x * self.count


class Remembers(Small):
    def between(self, x: Any) -> Any:
        self.seen = x
        return x


class WithoutGradients(Small):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.norm(self.conv(x)).relu()
        return self.head(y.mean((2, 3)))


class WithShortNumbers(Small):
    def between(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.matmul(x, x.transpose(2, 3)).float()


class CustomNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() - 1


class HasCustomNorm(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = CustomNorm(8)

    def between(self, x: Any) -> Any:
        return self.norm(x)


UNFAITHFUL: list[type[Small]] = [
    FunctionalDropout, TrainBranch, NormBranch, Attention, TorchDepth, PythonDepth, NumpyDepth, ReadsWeight,
    MakesTensor, Counts, CountsInBuffer, ScalesBuffer, CountsInData, Remembers, WithoutGradients, WithShortNumbers,
    HasCustomNorm,
]  # fmt: skip


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


@pytest.mark.parametrize("packed_in_training", [True, False])
@pytest.mark.parametrize("kind", UNFAITHFUL)
def test_decisions_in_python_are_taken_at_every_call(kind: type[Small], packed_in_training: bool) -> None:
    seed()
    model, x = kind().train(packed_in_training), torch.rand(6, 2, 6, 6)
    mine = packed_model(model)
    assert not isinstance(mine, fx.GraphModule)
    for training in (True, False, True):
        for _ in range(3):
            seed()
            wanted = model.train(training)(x)
            seed()
            out = mine.train(training)(x)
            torch.testing.assert_close(out, wanted)
    wanted.sum().backward()
    out.sum().backward()
    learning = {name.replace("values", "weight") for name, p in mine.named_parameters() if p.grad is not None}
    assert learning == {name for name, p in model.named_parameters() if p.grad is not None}
    assert unpack(mine)[0].keys() == model.state_dict().keys()


class QuietNorm(nn.BatchNorm2d):
    """A subclass with torch's forward."""


class HasQuietNorm(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = QuietNorm(8)


class UsesPlain(Small):
    def between(self, x: Any) -> Any:
        return x * self.plain + self.scale


@pytest.mark.parametrize("kind", [Small, UsesPlain, HasQuietNorm])
def test_other_forwards_are_traced(kind: type[Small]) -> None:
    model, x = kind(), torch.rand(6, 2, 6, 6)
    mine = packed_model(model)
    assert isinstance(mine, fx.GraphModule)
    assert unpack(mine)[0].keys() == model.state_dict().keys()
    torch.testing.assert_close(mine(x), model(x))
    torch.testing.assert_close(freeze(mine)(x), model.eval()(x))


@pytest.mark.parametrize("kind", [Small, *UNFAITHFUL])
def test_packing_draws_no_random_numbers(kind: type[Small]) -> None:
    model = kind()
    found = masks(model)
    seed()
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()  # noqa: NPY002
    seed()
    pack(model, found)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted  # noqa: NPY002


@pytest.mark.parametrize("kind", [Small, FunctionalDropout])
@pytest.mark.parametrize("training", [True, False])
def test_each_module_keeps_its_mode(kind: type[Small], training: bool) -> None:
    model = kind().train(training)
    model.norm.train(not training)
    mine = packed_model(model)
    assert {name: module.training for name, module in mine.named_modules() if name} == {
        "conv": training, "norm": not training, "head": training
    }  # fmt: skip
    assert mine.training is training
    assert {name: module.training for name, module in model.named_modules() if name}["norm"] is not training


@pytest.mark.parametrize("kind", [FunctionalDropout, TrainBranch, NormBranch, WithoutGradients])
def test_freezing_has_one_mode_and_needs_no_other(kind: type[Small]) -> None:
    model, x = kind(), torch.rand(9, 2, 6, 6)
    frozen = freeze(packed_model(model.train()))
    torch.testing.assert_close(frozen(x), model.eval()(x))
    assert isinstance(freeze(packed_model(Sequence())), Frozen)


class Sequence(nn.Module):
    """Dropout before packed layers that follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(F.dropout(x, 0.5, self.training)).relu())
