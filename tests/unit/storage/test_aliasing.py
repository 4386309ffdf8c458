"""Forwards that change tensors in place compute the same when they are packed, frozen and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import equipoise
from equipoise.deploy.frozen import Frozen, freeze
from equipoise.kernels import library
from equipoise.models import MODELS
from equipoise.topology import SET
from equipoise.topology.packing import pack
from sparse_helpers import masks, packed_model

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Blocks(nn.Module):
    """Layers of the usual kinds, for a given forward."""

    def __init__(self, steps: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.relu, self.same = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Identity()
        self.drop, self.six, self.flat = nn.Dropout(0.0), nn.ReLU6(inplace=True), nn.Flatten()
        self.register_buffer("seen", torch.zeros(4, 4, 6, 6))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(self, x)


@fx.wrap
def custom_function(x: Tensor) -> Tensor:
    x.mul_(3)
    return x


def as_statement(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The changed tensor is used under its old name."""

    def steps(m: Any, x: Any) -> Any:
        y = m.a(x)
        change(m, y)
        return m.b(y)

    return steps


def result_and_input(m: Any, x: Any) -> Any:
    y = m.a(x)
    return m.b(m.relu(y)) + y


def two_names(m: Any, x: Any) -> Any:
    other = y = m.a(x)
    y += 1
    return m.b(y) + other


def data_of(m: Any, x: Any) -> Any:
    y = m.a(x)
    data = y.detach()
    data *= 2
    return m.b(y)


def new_data(m: Any, x: Any) -> Any:
    y = m.a(x)
    z = y.detach()
    z.data = z.data + 1
    return m.b(z) + y


def view_before(m: Any, x: Any) -> Any:
    y = m.a(x)
    view = y.view(x.shape[0], -1)
    F.relu_(y)
    return view


def view_changed(m: Any, x: Any) -> Any:
    y = m.a(x)
    y[:, :2].relu_()
    return m.b(y)


def chunk_changed(m: Any, x: Any) -> Any:
    y = m.a(x).detach()  # for autograd forbids it
    first, _ = y.chunk(2, 1)
    first.sigmoid_()
    return m.b(y)


def through(layer: str) -> Callable[[Any, Any], Any]:
    """A layer whose result may be its input."""

    def steps(m: Any, x: Any) -> Any:
        y = m.a(x)
        z = getattr(m, layer)(y)
        return m.relu(z).flatten(1) + m.b(y).flatten(1)

    return steps


def given(m: Any, x: Any) -> Any:
    return m.b(m.relu(x)) + m.a(x)


def given_alone(m: Any, x: Any) -> Any:
    x += 1
    return m.b(m.a(x))


def assigned(m: Any, x: Any) -> Any:
    y = m.a(x)
    y[:, :2] = 0
    return m.b(y)


def out_argument(m: Any, x: Any) -> Any:
    y = m.a(x).detach()
    torch.add(y, 1, out=y)
    return m.b(y)


def remembered(m: Any, x: Any) -> Any:
    m.seen.copy_(m.a(x).detach())
    return m.b(m.seen)


OVERWRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    "module": as_statement(lambda m, y: m.relu(y)),
    "module by keyword": as_statement(lambda m, y: m.relu(input=y)),
    "another module": as_statement(lambda m, y: m.six(y)),
    "function": as_statement(lambda m, y: F.relu(y, inplace=True)),
    "positional option": as_statement(lambda m, y: F.leaky_relu(y, 0.1, True)),
    "bounds": as_statement(lambda m, y: F.hardtanh(y, 0.0, 0.1, inplace=True)),
    "function with underscore": as_statement(lambda m, y: torch.clamp_(y, 0, 0.1)),
    "method": as_statement(lambda m, y: y.relu_()),
    "add_": as_statement(lambda m, y: y.add_(1)),
    "custom function": as_statement(lambda m, y: custom_function(y)),
    "after a norm": lambda m, x: as_statement(lambda _, y: m.relu(m.norm(y)) + m.relu(y))(m, x),
    "result and input": result_and_input,
    "two names": two_names,
    "detached": data_of,
    "new data": new_data,
    "view before": view_before,
    "view changed": view_changed,
    "chunk changed": chunk_changed,
    "identity": through("same"),
    "dropout": through("drop"),
    "flatten": through("flat"),
    "the input": given,
    "the input alone": given_alone,
    "part assigned": assigned,
    "out argument": out_argument,
    "a buffer": remembered,
}


def residual(m: Any, x: Any) -> Any:
    out = m.norm(m.a(x))
    out += x
    out = m.relu(out)
    return m.b(out)


def read_before(m: Any, x: Any) -> Any:
    y = m.a(x)
    out = y + 1
    return m.b(F.relu(y, inplace=True)) + out.clamp_(0, 1)


def shape_before(m: Any, x: Any) -> Any:
    y = m.a(x)
    images = y.size(0)
    return m.relu(y).view(images, -1)


def through_views(m: Any, x: Any) -> Any:
    return m.relu(m.flat(m.drop(m.same(m.b(m.a(x))))))


NOT_READ: dict[str, Callable[[Any, Any], Any]] = {
    "sequence": lambda m, x: m.b(m.relu(m.norm(m.a(x)))),
    "residual": residual,
    "read before": read_before,
    "shape before": shape_before,
    "through views": through_views,
    "custom function": lambda m, x: m.b(custom_function(m.a(x))),
}


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of parameters by their names before packing."""
    out = model(x.clone())
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    named = {name.replace(".values", ".weight"): p.grad for name, p in model.named_parameters()}
    return out.detach(), {name: grad for name, grad in named.items() if grad is not None}


def assert_same_function(model: nn.Module, path: Path) -> None:
    found, x = masks(model), torch.randn(4, 4, 6, 6)
    mine = pack(model, found)
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
    torch.testing.assert_close(freeze(mine)(x.clone()), wanted, rtol=1e-4, atol=1e-5)
    equipoise.save(model, path)
    into = copy.deepcopy(model)
    torch.testing.assert_close(equipoise.load(path, into=into)(x.clone()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", OVERWRITTEN)
def test_a_tensor_read_after_a_change_in_place_is_changed(case: str, tmp_path: Path) -> None:
    model = Blocks(OVERWRITTEN[case])
    assert not isinstance(packed_model(model), fx.GraphModule)
    assert_same_function(model, tmp_path / "model")


@pytest.mark.parametrize("case", NOT_READ)
def test_a_change_in_place_that_is_not_read_is_traced(case: str, tmp_path: Path) -> None:
    model = Blocks(NOT_READ[case])
    assert isinstance(packed_model(model), fx.GraphModule)
    assert_same_function(model, tmp_path / "model")


def test_a_change_in_place_of_the_input_reaches_the_caller() -> None:
    model = Blocks(given_alone)
    mine, x = packed_model(model), torch.zeros(2, 4, 6, 6)
    freeze(mine)(x)
    mine.eval()(x)
    assert torch.equal(x, torch.full_like(x, 2.0))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet34", "vgg16")])
def test_models_of_the_package_are_one_program(name: str) -> None:
    mine = pack(MODELS[name](), SET(sparsity=0.99))
    assert isinstance(mine, fx.GraphModule)
    assert isinstance(freeze(mine), Frozen)
