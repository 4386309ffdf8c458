"""A faster forward of a module that is used only as long as it computes the same function."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from equipoise.storage import compiled
from equipoise.storage.packed_modules import PackedLayer, PackedLinear
from equipoise.storage.trace import Reading, read

TOLERANCE = 1e-2  # of the largest output: far above rounding, far below another function
Run = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True)
class Plan:
    """A compiled graph, with all that it depends on."""

    reading: Reading
    run: Run


class Shortcut:
    """Replaces the forward of one module, which keeps its class, attributes, submodules and hooks.

    The shortcut takes a single plain tensor. The forward of the class runs in all other cases: with other arguments,
    with hooks inside the module, under autocast, in torch.export, and if the source of the forward is not a sequence
    of known calls. torch.compile calls the shortcut as one operator. If submodules or attributes change, the source is
    read again.

    The first batch of each mode and number of dimensions is also computed by the forward of the class, on copies of all
    buffers and with the same random numbers. If the results differ, a warning says so and the shortcut is not used
    again.

    Args:
        module: The module. Assign the shortcut to its attribute `forward`.
    """

    computes_the_same = True
    runs_in_autocast = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original = types.MethodType(type(module).forward, module)
        functools.update_wrapper(self, self.original)
        self.__code__ = getattr(type(module).forward, "__code__", None)  # torch.export reads where it is defined
        self._name = next(iter(inspect.signature(self.original).parameters), None)
        self._plans: dict[tuple[bool, int], Plan | None] = {}
        self._differs = False
        self._key = compiled.register(self)

    def compile(self, reading: Reading, tokens: frozenset[str], exact: bool = False) -> Run | None:
        """Return a function of the module and its input; `None` if there is no faster one.

        Args:
            reading: The graph.
            tokens: Linear layers whose input has more than two dimensions, by name.
            exact: Whether to compute in float32, to be compared with the forward of the class.
        """
        raise NotImplementedError

    def pays(self, x: Tensor) -> bool:
        """Whether the shortcut is faster for a batch."""
        return True

    def is_current(self, plan: Plan) -> bool:
        """Whether the plan is that of the module as it is now."""
        return plan.reading.is_current()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)  # a copy reads its module again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.keys() == {self._name}:
            args, kwargs = tuple(kwargs.values()), {}
        if self._differs or kwargs or len(args) != 1 or not _is_batch(args[0]) or self._is_special():
            return self.original(*args, **kwargs)
        x: Tensor = args[0]
        if not self.pays(x):
            return self.original(x)
        if torch.compiler.is_compiling():
            return compiled.call(self.module, self._key, x)
        return self.run(self.module, x)

    def run(self, module: nn.Module, x: Tensor) -> Any:
        """Compute the output of the module, or of a copy of it with other tensors."""
        key = self.module.training, x.dim()
        plan = self._plans.get(key)
        if key not in self._plans or (plan is not None and not self.is_current(plan)):
            plan = self._first(key, x)
        return type(module).forward(module, x) if plan is None else plan.run(module, x)

    def _is_special(self) -> bool:
        """Whether something outside the module takes part in its calls, such as autocast or torch.export."""
        if torch.is_autocast_enabled("cpu") and not self.runs_in_autocast:
            return True
        return torch.compiler.is_exporting() if torch.compiler.is_compiling() else _has_any_global_hook()

    @torch.no_grad()
    def _first(self, key: tuple[bool, int], x: Tensor) -> Plan | None:
        """Compile a plan and compare it with the forward of the class."""
        reading = read(self.module)
        if reading is not None and reading.has_hooks():
            return None  # and try again at the next call, when they may be gone
        self._plans[key] = None
        if reading is None:
            return None
        with torch.autocast("cpu", enabled=False):
            return self._compared(key, x, reading)

    def _compared(self, key: tuple[bool, int], x: Tensor, reading: Reading) -> Plan | None:
        tokens: set[PackedLinear] = set()
        expected = _outcome(lambda twin: type(twin).forward(twin, x), self.module, tokens)
        names = {name for name, layer in self.module.named_modules() if layer in tokens}
        run, exact = (self.compile(reading, frozenset(names), exact) for exact in (False, True))
        if run is None or exact is None:
            return None
        plan = Plan(reading, run)
        found = _outcome(lambda twin: exact(twin, x), self.module)
        if isinstance(expected, Exception) and isinstance(found, Exception):
            del self._plans[key]  # the input was wrong
        elif _agree(found, expected):
            self._plans[key] = plan
        else:
            self._differs = True
            warnings.warn(
                f"the blocked layout would change what {type(self.module).__name__} computes; "
                "its layers run one by one, which is slower",
                stacklevel=5,
            )
            return None
        return plan


def _is_batch(x: Any) -> bool:
    return type(x) is Tensor and 2 <= x.dim() <= 4  # others have no blocked layout


def _outcome(function: Callable[[nn.Module], Any], module: nn.Module, tokens: set[PackedLinear] | None = None) -> Any:
    """The result and the buffers after a call on a copy of the module, or the error that it raised."""
    twin = _twin(module, {}, tokens)
    with torch.random.fork_rng(devices=[]):
        try:
            return function(twin), *twin.buffers()
        except Exception as error:  # a forward may raise anything
            return error


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module], tokens: set[PackedLinear] | None) -> nn.Module:
    """A module with the same parameters, and copies of its buffers and attributes. Shortcuts are left out."""
    if isinstance(module, PackedLayer):  # whose forward changes no state
        return _Watched(module, tokens) if tokens is not None and isinstance(module, PackedLinear) else module
    if module not in made:
        twin = made[module] = module.__new__(type(module))
        own = {name: value for name, value in vars(module).items() if name != "forward"}
        buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
        children = {
            name: None if child is None else _twin(child, made, tokens) for name, child in module._modules.items()
        }
        twin.__dict__ = {**own, "_buffers": buffers, "_modules": children}
    return made[module]


class _Watched(nn.Module):
    """A linear layer that is added to a set if its input has more than two dimensions."""

    def __init__(self, layer: PackedLinear, tokens: set[PackedLinear]) -> None:
        super().__init__()
        self.layer, self.tokens = layer, tokens

    def forward(self, x: Tensor) -> Any:
        if x.dim() > 2:
            self.tokens.add(self.layer)
        return self.layer(x)


def _agree(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        same = isinstance(found, tuple) and len(found) == len(expected)
        return same and all(map(_agree, found, expected))
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    mine, theirs = found.double(), expected.double()
    largest = theirs.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if theirs.numel() else 0.0
    return torch.allclose(mine, theirs, TOLERANCE, TOLERANCE * largest, equal_nan=True)
