"""Forwards are read from their source, and decisions that they take in Python are taken at every call."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise
from equipoise.deploy.frozen import freeze, is_frozen
from equipoise.kernels import library
from equipoise.models import MODELS
from equipoise.storage.pack import blocked_modules, unpack
from equipoise.topology import SET
from equipoise.topology.packing import pack
from sparse_helpers import masks, packed_model

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Small(nn.Module):
    """A convolution, the steps of a subclass, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(0.0))
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


DECIDING: list[type[Small]] = [
    FunctionalDropout, TrainBranch, NormBranch, Attention, TorchDepth, PythonDepth, NumpyDepth, ReadsWeight,
    MakesTensor, Counts, CountsInBuffer, ScalesBuffer, CountsInData, Remembers, WithoutGradients, WithShortNumbers,
    HasCustomNorm,
]  # fmt: skip


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


@pytest.mark.parametrize("packed_in_training", [True, False])
@pytest.mark.parametrize("kind", DECIDING)
def test_decisions_in_python_are_taken_at_every_call(kind: type[Small], packed_in_training: bool) -> None:
    seed()
    model, x = kind().train(packed_in_training), torch.rand(6, 2, 6, 6)
    mine = packed_model(model)
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


class UsesBuffer(Small):
    def between(self, x: Any) -> Any:
        return x * (self.scale * 2) + self.count


@pytest.mark.parametrize("kind", [Small, UsesBuffer, HasQuietNorm, FunctionalDropout, TrainBranch])
def test_forwards_of_known_calls_are_read(kind: type[Small]) -> None:
    model, x = kind(), torch.rand(6, 2, 6, 6)
    mine = packed_model(model)
    assert blocked_modules(mine) == [""]
    assert unpack(mine)[0].keys() == model.state_dict().keys()
    seed()
    wanted = model(x)
    seed()
    torch.testing.assert_close(mine(x), wanted)
    torch.testing.assert_close(freeze(mine)(x), model.eval()(x))


@pytest.mark.parametrize("kind", [Small, *DECIDING])
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
    assert is_frozen(freeze(packed_model(Sequence())))


class Sequence(nn.Module):
    """Dropout before packed layers that follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(F.dropout(x, 0.5, self.training)).relu())


# -- changes in place


class Blocks(nn.Module):
    """Layers of the usual kinds; subclasses add a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.relu, self.same = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Identity()
        self.drop, self.six, self.flat = nn.Dropout(0.0), nn.ReLU6(inplace=True), nn.Flatten()
        self.register_buffer("seen", torch.zeros(4, 4, 6, 6))


def blocks(forward: Callable[[Any, Any], Any]) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = type("Case", (Blocks,), {"forward": forward})()
    return made


def module(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = m.relu(y)
    return m.b(y) + z


def module_by_keyword(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = m.relu(input=y)
    return m.b(y) + z


def another_module(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = m.six(y)
    return m.b(y) + z


def function(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = F.relu(y, inplace=True)
    return m.b(y) + z


def positional_option(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = F.leaky_relu(y, 0.1, True)
    return m.b(y) + z


def function_with_underscore(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = torch.clamp_(y, 0, 0.1)
    return m.b(y) + z


def method(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = y.relu_()
    return m.b(y) + z


def statement(m: Any, x: Any) -> Any:
    y = m.a(x)
    y.add_(1)
    return m.b(y)


def after_a_norm(m: Any, x: Any) -> Any:
    y = m.norm(m.a(x))
    return m.relu(y) + m.b(y)


def two_names(m: Any, x: Any) -> Any:
    other = y = m.a(x)
    y += 1
    return m.b(y) + other


def detached(m: Any, x: Any) -> Any:
    y = m.a(x)
    data = y.detach()
    data *= 2
    return m.b(y)


def view_before(m: Any, x: Any) -> Any:
    y = m.a(x)
    view = y.view(4, -1)
    z = F.relu_(y)
    return view + z.flatten(1)


def view_changed(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = y.flatten(1).relu_()
    return m.b(y).flatten(1) + z


def identity(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = m.same(y)
    return m.relu(z) + m.b(y)


def dropout(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = m.drop(y)
    return m.relu(z) + m.b(y)


def flatten(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = m.flat(y)
    return m.relu(z) + m.b(y).flatten(1)


def the_input(m: Any, x: Any) -> Any:
    return m.b(m.relu(x)) + m.a(x)


def the_input_alone(m: Any, x: Any) -> Any:
    x += 1
    return m.b(m.a(x))


def part_assigned(m: Any, x: Any) -> Any:
    y = m.a(x)
    y[:, :2] = 0
    return m.b(y)


def out_argument(m: Any, x: Any) -> Any:
    y = m.a(x).detach()
    z = torch.add(y, 1, out=y)
    return m.b(y) + z


def buffer(m: Any, x: Any) -> Any:
    y = m.seen.copy_(m.a(x).detach())
    return m.b(m.seen) + y


def buffer_by_operator(m: Any, x: Any) -> Any:
    y = m.seen
    y += 1
    return m.b(m.a(x)) + m.seen


OVERWRITTEN = [
    module, module_by_keyword, another_module, function, positional_option, function_with_underscore, method,
    statement, after_a_norm, two_names, detached, view_before, view_changed, identity, dropout, flatten, the_input,
    the_input_alone, part_assigned, out_argument, buffer, buffer_by_operator,
]  # fmt: skip


def sequence(m: Any, x: Any) -> Any:
    return m.b(m.relu(m.norm(m.a(x))))


def residual(m: Any, x: Any) -> Any:
    out = m.norm(m.a(x))
    out += x
    out = m.relu(out)
    return m.b(out)


def through_views(m: Any, x: Any) -> Any:
    return m.relu(m.flat(m.drop(m.same(m.b(m.a(x))))))


NOT_READ = [sequence, residual, through_views]


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of parameters by their names before packing."""
    out = model(x.clone())
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    named = {name.replace(".values", ".weight"): p.grad for name, p in model.named_parameters()}
    return out.detach(), {name: grad for name, grad in named.items() if grad is not None}


def assert_same_function(model: nn.Module, path: Path) -> None:
    found, x = masks(model), torch.randn(4, 4, 6, 6)
    mine = pack(model, found)
    equipoise.save(model, path)
    frozen, loaded = freeze(mine), equipoise.load(path, into=model)
    for training in (True, False):
        model.zero_grad()
        mine.zero_grad()
        wanted, theirs = gradients(model.train(training), x)
        out, ours = gradients(mine.train(training), x)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            exact = theirs[name][found[name]] if name in found else theirs[name]
            torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-4)
    model.load_state_dict(unpack(frozen)[0])
    wanted = model(x.clone())
    torch.testing.assert_close(frozen(x.clone()), wanted, rtol=1e-4, atol=1e-5)
    model.load_state_dict(loaded.state_dict() if not is_frozen(loaded) else unpack(loaded)[0])
    torch.testing.assert_close(loaded(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("forward", OVERWRITTEN)
def test_a_tensor_read_after_a_change_in_place_is_changed(forward: Callable[[Any, Any], Any], tmp_path: Path) -> None:
    model = blocks(forward)
    assert blocked_modules(packed_model(model)) == []
    assert_same_function(model, tmp_path / "model")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("forward", NOT_READ)
def test_a_change_in_place_that_is_not_read_is_allowed(forward: Callable[[Any, Any], Any], tmp_path: Path) -> None:
    model = blocks(forward)
    assert blocked_modules(packed_model(model)) == [""]
    assert_same_function(model, tmp_path / "model")


def test_a_change_in_place_of_the_input_reaches_the_caller() -> None:
    mine, x = packed_model(blocks(the_input_alone)), torch.zeros(2, 4, 6, 6)
    freeze(mine)(x)
    mine.eval()(x)
    assert torch.equal(x, torch.full_like(x, 2.0))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet34", "vgg16")])
def test_models_of_the_package_are_one_program(name: str) -> None:
    mine = pack(MODELS[name](), SET(sparsity=0.99))
    assert blocked_modules(mine) == ([] if name == "mlp" else [""])  # linear layers are faster on plain vectors
    assert is_frozen(freeze(mine))
