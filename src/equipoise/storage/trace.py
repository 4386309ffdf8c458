"""Trace a model with torch.fx if one graph computes its forward in every mode and at every call."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.proxy import Attribute
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.storage.aliasing import IN_PLACE, is_overwritten


class _Proxy(fx.Proxy):
    """Records `a += b` as it is. torch's proxy records `a = a + b`, which differs if `a` has another name."""

    def __getattr__(self, name: str) -> Attribute:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "root", "attr", "_node"):
            raise TypeError(f"a graph cannot set the attribute {name} of a tensor")
        super().__setattr__(name, value)


class _Attribute(_Proxy, Attribute):
    """An attribute of a proxy, such as `a.data`."""


def _in_place(name: str) -> Callable[..., fx.Proxy]:
    def record(self: fx.Proxy, *operands: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, *operands), {})

    return record


for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class Tracer(fx.Tracer):
    """A tracer that also records in-place operators, and refuses forwards that change modes such as `no_grad`.

    Args:
        functions: Functions that are recorded as one call.
    """

    def __init__(self, functions: tuple[Callable[..., Any], ...] = ()) -> None:
        super().__init__(autowrap_functions=functions)
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise RuntimeError("a graph cannot contain no_grad or autocast")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _modes() -> tuple[bool, bool, torch.dtype]:
    """Modes that a `with` statement in a forward may change for the operations within."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def faithful_graph(
    model: nn.Module, tracer: Callable[[], fx.Tracer], modes: tuple[bool, ...] = (True, False)
) -> fx.Graph | None:
    """Return the graph of a model's forward; `None` if no graph computes the same function at every call.

    Tracing runs the forward once on symbolic values, and the graph repeats every decision that Python made in that
    run. The graphs of all modes must therefore agree, and tracing must neither draw random numbers nor change the
    model. The forward must not read a value that it changed in place, because the blocked operations that replace the
    graph's operations make new values.

    Args:
        model: The model; it is copied.
        tracer: Returns a new tracer.
        modes: Modes in which the graph must be valid; `True` is train mode.
    """
    graphs = [_trace(model, tracer(), training) for training in modes]
    codes = {None if graph is None else graph.python_code("self").src for graph in graphs}
    return graphs[0] if len(codes) == 1 else None


def _trace(model: nn.Module, tracer: fx.Tracer, training: bool) -> fx.Graph | None:
    """Trace a copy, so that neither modes nor side effects of the forward reach the model."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.training = training  # not `train()`, which a class may override
    before = _state(model)
    with _randomness() as drawn, _Writes() as writes:
        try:
            graph = tracer.trace(model)
        except Exception:  # a forward may raise anything on symbolic values
            return None
        if drawn() or writes.found:
            return None
    after = _state(model)
    unchanged = before.keys() == after.keys() and all(value is after[key] for key, value in before.items())
    return graph if unchanged and not is_overwritten(graph, model) else None


class _Writes(TorchDispatchMode):
    """Finds operations that write to a tensor while a forward is traced.

    The graph contains only the operations on symbolic values. A write to a buffer would happen during tracing and in no
    later call.
    """

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def _state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return all attributes of the modules.

    If a forward makes a tensor, such as the dense weight of a packed layer, the tracer stores it as an attribute of
    the model, and the graph would always use that value.
    """
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in {**vars(module), **module._parameters, **module._buffers, **module._modules}.items()
    }


@contextmanager
def _randomness() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether random numbers were drawn; restore the global generators on exit."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    before = _generators()
    try:
        yield lambda: _generators() != before
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _generators() -> tuple[Any, ...]:
    """States of the global generators, in a form that can be compared."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), *rest
