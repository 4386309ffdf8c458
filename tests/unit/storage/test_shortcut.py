"""Packed and loaded models compute what the dense model computes, whatever Python decides in its forward."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

import equipoise
from equipoise.deploy.frozen import freeze, is_frozen
from equipoise.kernels import blocked, library, operators
from equipoise.storage.pack import blocked_modules, unpack
from equipoise.storage.packed_modules import PackedLayer
from equipoise.topology.packing import pack
from sparse_helpers import convolutions, linear, masks, packed_model

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())

FACTOR = {"value": 2.0}


class Net(nn.Module):
    """Two linear layers; the cases below are its forwards."""

    factor = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)
        self.more = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.extra: nn.Module | None = None
        self.temperature, self.flag, self.depth, self.act = 1.0, False, 1, "relu"
        self.seen: list[int] = []
        self.scales = {"x": 2.0}
        self.register_buffer("scale", torch.tensor(2.0))
        self.plain = torch.tensor(2.0)

    def plain_forward(self, x: Tensor) -> Tensor:
        return self.b(self.relu(self.a(x)))

    @property
    def doubled(self) -> float:
        return 2 * self.temperature


# -- forwards


def isinstance_of_input(self: Any, x: Any) -> Any:
    if isinstance(x, Tensor):
        x = x * 10
    return self.b(self.relu(self.a(x)))


def hasattr_of_input(self: Any, x: Any) -> Any:
    x = x * 10 if hasattr(x, "storage_offset") else x
    return self.b(self.relu(self.a(x)))


def is_tensor_of_input(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x * 10 if torch.is_tensor(x) else x)))


def type_of_input(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x * 10 if type(x) is Tensor else x)))


def sequence_or_tensor(self: Any, x: Any) -> Any:
    x = torch.cat(x) if isinstance(x, (list, tuple)) else x
    return self.b(self.relu(self.a(x)))


def temperature(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) / self.temperature


def flag(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if self.flag else x


def depth(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    for _ in range(self.depth):
        x = x * 3
    return x


def modules_in_a_list(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    for layer in self.more:
        x = layer(x)
    return x


def optional_module(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    if self.extra is not None:
        x = self.extra(x)
    return x


def by_name(self: Any, x: Any) -> Any:
    return self.b(getattr(F, self.act)(self.a(x)))


def class_attribute(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) * self.factor


def dictionary(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) * self.scales["x"]


def global_number(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) * FACTOR["value"]


def computed_property(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) * self.doubled


def buffer(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) * (self.scale + 1)


def tensor_attribute(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x))) * (self.plain + 1)


def grad_enabled(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if torch.is_grad_enabled() else x


def inference_mode(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if torch.is_inference_mode_enabled() else x


def autocast(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if torch.is_autocast_enabled("cpu") else x


def exception(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    try:
        return x.view(3, 2, 4).sum(1)
    except RuntimeError:
        return x * 10


def shape(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if x.shape[0] > 4 else x


def data(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if float(x.detach().sum()) > -1e9 else x


def list_changed(self: Any, x: Any) -> Any:
    self.seen.append(1)
    return self.b(self.relu(self.a(x))) * len(self.seen)


def attribute_changed(self: Any, x: Any) -> Any:
    self.temperature = self.temperature + 1
    return self.b(self.relu(self.a(x))) * self.temperature


def optional_mask(self: Any, x: Any, mask: Any = None) -> Any:
    h = self.relu(self.a(x))
    if mask is not None:
        h = h * mask
    return self.b(h)


def any_arguments(self: Any, *inputs: Any, **named: Any) -> Any:
    x = inputs[0] if inputs else named["x"]
    return self.b(self.relu(self.a(x))) * (1 + len(named))


def training(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if self.training else x


def dropout(self: Any, x: Any) -> Any:
    return self.b(F.dropout(self.relu(self.a(x)), 0.5, self.training))


def random_depth(self: Any, x: Any) -> Any:
    x = self.b(self.relu(self.a(x)))
    return x * 10 if random.random() < 0.5 else x


def without_gradients(self: Any, x: Any) -> Any:
    with torch.no_grad():
        h = self.relu(self.a(x))
    return self.b(h)


@torch.no_grad()
def decorated(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x)))


def ten_times(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) * 10

    return wrapper


def undecorated(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x)))


def custom_function(self: Any, x: Any) -> Any:
    return self.b(scaled(self.relu(self.a(x))))


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR["value"]


def method(self: Any, x: Any) -> Any:
    return self.plain_forward(x)


def layer_after_layer(self: Any, x: Any) -> Any:
    return self.b(self.relu(self.a(x)))


# -- changes after packing, made in the same way to every model


def set_attribute(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model, name, value)


def hook(name: str, kind: str = "register_forward_hook") -> Callable[[nn.Module], None]:
    def add(model: nn.Module) -> None:
        if kind == "register_forward_pre_hook":
            model.get_submodule(name).register_forward_pre_hook(lambda _, args: (args[0] * 3,))
        else:
            model.get_submodule(name).register_forward_hook(lambda _, args, out: out * 3)

    return add


def append_layer(model: Any) -> None:
    model.more.append(nn.ReLU())


def set_scale(model: Any) -> None:
    model.scales["x"] = 5.0


def set_buffer(model: Any) -> None:
    model.scale = torch.tensor(5.0)


def set_class_attribute(model: Any) -> None:
    type(model).factor = 5.0


def set_forward(model: Any) -> None:
    model.forward = lambda x: model.plain_forward(x) * 5


def set_forward_of_child(model: Any) -> None:
    model.relu.forward = torch.tanh


def set_method_of_class(model: Any) -> None:
    type(model).plain_forward = lambda self, x: self.b(self.a(x))


def set_child(model: Any) -> None:
    model.relu = nn.Tanh()


def grow(model: Any) -> None:
    model.extra = nn.Hardtanh(-0.1, 0.1)


def nothing(model: nn.Module) -> None:
    pass


@dataclass
class Case:
    forward: Callable[..., Any]
    change: Callable[[nn.Module], None] = nothing
    before: Callable[[nn.Module], None] = nothing
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-4


MASK = (torch.arange(9) % 2).float()
CASES = {
    "isinstance": Case(isinstance_of_input),
    "hasattr": Case(hasattr_of_input),
    "is_tensor": Case(is_tensor_of_input),
    "type": Case(type_of_input),
    "a list of tensors": Case(sequence_or_tensor),
    "temperature": Case(temperature, set_attribute("temperature", 4.0)),
    "flag": Case(flag, set_attribute("flag", True)),
    "depth": Case(depth, set_attribute("depth", 3)),
    "layer appended": Case(modules_in_a_list, append_layer),
    "layer appears": Case(optional_module, grow),
    "layer replaced": Case(layer_after_layer, set_child),
    "function by name": Case(by_name, set_attribute("act", "tanh")),
    "class attribute": Case(class_attribute, set_class_attribute),
    "dictionary": Case(dictionary, set_scale),
    "global": Case(global_number, lambda _: FACTOR.update(value=5.0)),
    "custom function": Case(custom_function, lambda _: FACTOR.update(value=5.0)),
    "property": Case(computed_property, set_attribute("temperature", 4.0)),
    "buffer": Case(buffer, set_buffer),
    "tensor attribute": Case(tensor_attribute, set_attribute("plain", torch.tensor(5.0))),
    "hook on the model": Case(layer_after_layer, before=hook("")),
    "pre-hook on the model": Case(layer_after_layer, before=hook("", "register_forward_pre_hook")),
    "hook on a ReLU": Case(layer_after_layer, before=hook("relu")),
    "pre-hook on a ReLU": Case(layer_after_layer, before=hook("relu", "register_forward_pre_hook")),
    "hook on a layer": Case(layer_after_layer, before=hook("a")),
    "pre-hook on a layer": Case(layer_after_layer, before=hook("a", "register_forward_pre_hook")),
    "later hook on the model": Case(layer_after_layer, hook("")),
    "later hook on a ReLU": Case(layer_after_layer, hook("relu")),
    "later pre-hook on a layer": Case(layer_after_layer, hook("a", "register_forward_pre_hook")),
    "grad enabled": Case(grad_enabled),
    "grad disabled": Case(grad_enabled, context=torch.no_grad),
    "inference mode": Case(inference_mode, context=torch.inference_mode),
    "autocast": Case(autocast, context=lambda: torch.autocast("cpu", torch.bfloat16), rtol=3e-2),
    "exception": Case(exception),
    "shape": Case(shape),
    "data": Case(data),
    "list changed": Case(list_changed),
    "attribute changed": Case(attribute_changed),
    "mask left out": Case(optional_mask),
    "mask": Case(optional_mask, args=(MASK,)),
    "mask by keyword": Case(optional_mask, kwargs={"mask": MASK}),
    "any arguments": Case(any_arguments, kwargs={"other": 1}),
    "training": Case(training),
    "dropout": Case(dropout),
    "random depth": Case(random_depth),
    "no_grad inside": Case(without_gradients),
    "decorated": Case(decorated),
    "wrapped": Case(ten_times(undecorated)),
    "method": Case(method, set_method_of_class),
    "forward of the model set": Case(layer_after_layer, set_forward),
    "forward of a layer set": Case(layer_after_layer, set_forward_of_child),
}


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


def trio(case: Case, path: Path) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The dense model, and its packed and loaded forms."""
    seed()
    model: nn.Module = type("Case", (Net,), {"forward": case.forward})()
    case.before(model)
    found = masks(model)
    equipoise.save(model, path)
    return model, pack(model, found), equipoise.load(path, into=model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_decisions_in_python_are_taken_at_every_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTOR, "value", 2.0)
    case = CASES[name]
    models = trio(case, tmp_path / "model")
    batches = [torch.rand(images, 12) for images in (6, 3, 6)]
    changed = False
    for train in (False, True, False):
        for x in batches:
            outputs = []
            for model in models:
                seed()
                model.train(train)
                with case.context():
                    outputs.append(model(x, *case.args, **case.kwargs))
            wanted, packed, loaded = outputs
            torch.testing.assert_close(packed.float(), wanted.float(), rtol=case.rtol, atol=case.rtol)
            torch.testing.assert_close(loaded.float(), wanted.float(), rtol=case.rtol, atol=case.rtol)
            assert packed.requires_grad is wanted.requires_grad
        change, changed = (nothing if changed else case.change), True
        for model in models:
            change(model)


def assert_same(mine: nn.Module, model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(mine(x), model(x), rtol=1e-4, atol=1e-5)


# -- hooks and arguments


def with_every_form(model: nn.Module) -> list[nn.Module]:
    mine = packed_model(model)
    assert blocked_modules(mine) == [""]
    frozen = freeze(mine)
    assert is_frozen(frozen)
    return [mine.eval(), frozen]


def test_hooks_of_all_modules() -> None:
    model, x = convolutions(), torch.rand(3, 1, 8, 8)
    forms = with_every_form(model)
    wanted = model(x)
    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    try:
        for mine in forms:
            seen.clear()
            assert_same(mine, nn.Sequential(*model), x)
            assert seen.count("ReLU") == seen.count("Flatten") == 2
    finally:
        handle.remove()
    seen.clear()
    for mine in forms:
        torch.testing.assert_close(mine(x), wanted, rtol=1e-4, atol=1e-5)
    assert seen == []


def test_hooks_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = convolutions(), torch.rand(3, 1, 8, 8)
    mine, frozen = with_every_form(model)
    seen: list[Tensor] = []
    for form, layer in ((mine, mine[2]), (frozen, frozen[2])):  # type: ignore[index]
        assert_same(form, model, x)
        handle = layer.register_forward_hook(lambda _, args, out: seen.append(out))
        assert_same(form, model, x)
        torch.testing.assert_close(seen.pop(), model[:3](x), rtol=1e-4, atol=1e-5)  # type: ignore[index]
        handle.remove()
        assert_same(form, model, x)
        assert not seen


def test_backward_hooks() -> None:
    model, x = linear().train(), torch.rand(3, 12)
    mine = packed_model(model)
    mine(x)
    for net in (model, mine):
        net.get_submodule("1").register_full_backward_hook(lambda _, grad, __: (grad[0] * 5,))
        net(x).sum().backward()
    torch.testing.assert_close(mine.get_parameter("0.bias").grad, model.get_parameter("0.bias").grad)


class Tagged(Tensor):
    """A subclass of Tensor whose operations return it."""


def test_other_forms_of_the_argument() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 9), nn.Linear(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    model, x = Net(), torch.rand(3, 12)
    for mine in with_every_form(model):
        torch.testing.assert_close(mine(x=x), model(x))
        torch.testing.assert_close(mine(nn.Parameter(x)), model(x))
        torch.testing.assert_close(mine(x[0]), model(x[0]))
        assert isinstance(mine(x.as_subclass(Tagged)), Tensor)
        with pytest.raises(TypeError, match="unexpected keyword"):
            mine(x, mask=x)
        with pytest.raises(TypeError, match="positional argument"):
            mine()
        assert list(inspect.signature(mine.forward).parameters) == ["x"]


@pytest.mark.parametrize("shapes", [[(5, 12), (2, 5, 12), (2, 3, 5, 12), (2, 2, 3, 5, 12), (12,), (7, 12)]])
def test_inputs_of_another_shape(shapes: list[tuple[int, ...]]) -> None:
    model = linear()
    for mine in with_every_form(model):
        for shape in shapes:
            assert_same(mine, model, torch.rand(shape))


def test_tokens_stay_out_of_the_image_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4), nn.LayerNorm(4), nn.Linear(4, 12))
    shapes = []
    block = blocked._block
    monkeypatch.setattr(blocked, "_block", lambda x, border: (shapes.append(tuple(x.shape)), block(x, border))[1])
    for mine in (packed_model(model), freeze(packed_model(model))):
        for shape in ((2, 5, 12), (2, 3, 5, 12)):
            x = torch.rand(shape)
            assert_same(mine, model, x)
            shapes.clear()
            mine(x)
            rows = x[..., 0].numel()
            assert shapes == [(rows, 12, 1, 1), (rows, 9, 1, 1), (rows, 4, 1, 1)]  # once for each layer


# -- the check of the first batch


class Counted(nn.BatchNorm1d):
    """Counts its calls."""

    calls = 0

    def _check_input_dim(self, x: Tensor) -> None:
        Counted.calls += 1


def test_each_mode_is_compared_once() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(12, 9), Counted(9), nn.Dropout(), nn.ReLU(), nn.Linear(9, 4)),
        torch.rand(8, 12),
    )
    mine = packed_model(model)
    assert blocked_modules(mine) == [""]
    counts = []
    for training in (True, True, False, True, False):
        Counted.calls = 0
        mine.train(training)(x)
        counts.append(Counted.calls)
    assert counts == [3, 1, 3, 1, 1]  # the forward of the class and the graph on copies, then the batch itself


def test_the_comparison_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.Linear(9, 4)), torch.rand(8, 12)
    mine = packed_model(model)
    for _ in range(2):
        seed()
        wanted = model(x)
        drawn = torch.rand(2)
        seed()
        torch.testing.assert_close(mine(x), wanted)
        assert torch.equal(torch.rand(2), drawn)
        state = unpack(mine)[0]
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(state[name], buffer)
    assert all(parameter.grad is None for parameter in mine.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_a_difference_is_told_once_and_the_layers_run_one_by_one(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = convolutions().train(training), torch.rand(3, 1, 8, 8)
    mine = packed_model(model)
    right = operators.fused
    wrong = lambda *args, **kwargs: (y := right(*args, **kwargs)).with_data(y.data * 1.1)  # noqa: E731
    monkeypatch.setattr(operators, "fused", wrong)
    with pytest.warns(UserWarning, match="the blocked layout would change what Sequential computes") as told:
        assert_same(mine, model, x)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (training, not training):
            mine.train(mode)
            model.train(mode)
            assert_same(mine, model, x)
    state = unpack(mine)[0]
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(state[name], buffer)


def test_a_frozen_model_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = convolutions(), torch.rand(3, 1, 8, 8)
    frozen = freeze(packed_model(model))
    monkeypatch.setattr("equipoise.deploy.program.affine", lambda norm, dtype: (norm.weight * 3, norm.bias))
    with pytest.warns(UserWarning, match="would change what Sequential computes"):
        assert_same(frozen, model, x)
    assert_same(frozen, model, x)


# -- what a packed model keeps


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)])
        self.heads = nn.ModuleDict({"one": nn.Linear(12, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["one"](x)

    def first(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def test_indices_attributes_and_methods_stay() -> None:
    x = torch.rand(3, 12)
    model = linear()
    for mine in with_every_form(model):
        assert isinstance(mine, nn.Sequential)
        assert len(mine) == 3
        assert isinstance(mine[0], PackedLayer)
        assert isinstance(mine[1], nn.ReLU)
        torch.testing.assert_close(mine[:2](x), model[:2](x))  # type: ignore[index]
    custom = Blocks()
    for mine in with_every_form(custom):
        assert isinstance(mine, Blocks)
        assert isinstance(mine.blocks[0], PackedLayer)
        torch.testing.assert_close(mine.first(x), custom.first(x))
        torch.testing.assert_close(copy.deepcopy(mine)(x), custom(x))


def test_norms_stay_norms() -> None:
    mine = packed_model(convolutions())
    assert [type(m).__mro__[2] for m in mine.modules() if isinstance(m, nn.BatchNorm2d)] == [nn.BatchNorm2d]


class Outer(nn.Module):
    """A forward that cannot be read around one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = convolutions()[:6], nn.Linear(24, 4)  # type: ignore[index]

    def forward(self, x: Any) -> Tensor:
        x = torch.stack(list(x)) if isinstance(x, (list, Tensor)) else x
        return self.head(self.inner(x))


def test_parts_that_can_be_read_run_in_the_blocked_layout() -> None:
    model, x = Outer(), torch.rand(3, 1, 8, 8)
    mine = packed_model(model)
    assert blocked_modules(mine) == ["inner"]
    assert_same(mine, model, x)
    torch.testing.assert_close(mine(list(x)), model(x), rtol=1e-4, atol=1e-5)


def test_a_forward_without_source_runs_as_it_is() -> None:
    space: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.b(self.relu(self.a(x)))", space)
    model: nn.Module = type("Case", (Net,), space)()
    mine = packed_model(model)
    assert blocked_modules(mine) == []
    assert_same(mine, model, torch.rand(3, 12))


def test_a_forward_whose_file_was_edited_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edited_forward.py"
    body = "        return self.b(self.relu(self.a(x)){})\n"
    head = "from test_shortcut import Net\n\n\nclass Edited(Net):\n    def forward(self, x):\n"
    file.write_text(head + body.format(".sigmoid()"))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = __import__("edited_forward").Edited()
    file.write_text(head + body.format(""))
    mine = packed_model(model)
    assert blocked_modules(mine) == []
    assert_same(mine, model, torch.rand(3, 12))


def test_a_weight_that_a_hook_computes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    with torch.no_grad():
        prune.identity(model[0], "weight")
    with pytest.raises(equipoise.UserError, match=r'cannot pack "0\.weight": a hook computes it'):
        pack(model, {"0.weight": torch.ones(6, 6).bool()})
