"""Tracing a model by torch.fx, where what is written down is what the model does in every mode and at every call."""

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

from equipoise.storage.aliasing import IN_PLACE, is_overwritten


class _Symbol(fx.Proxy):
    """torch's own takes `a += b` for `a = a + b`, which is something else where `a` has another name too."""

    def __getattr__(self, name: str) -> Attribute:
        return _Part(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "root", "attr", "_node"):
            raise TypeError(f"a graph cannot set .{name} of a tensor")
        super().__setattr__(name, value)


class _Part(_Symbol, Attribute):
    """An attribute of one, such as `a.data`."""


def _in_place(name: str) -> Callable[..., fx.Proxy]:
    def write_down(self: fx.Proxy, *operands: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, *operands), {})

    return write_down


for _name in IN_PLACE:
    setattr(_Symbol, f"__{_name}__", _in_place(_name))


class Tracer(fx.Tracer):
    """torch's, but what is changed in place is written down as such, and a change of torch's modes is not lost."""

    def __init__(self, functions: tuple[Callable[..., Any], ...] = ()) -> None:
        """functions: not to be looked into."""
        super().__init__(autowrap_functions=functions)
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise RuntimeError("a graph has no place for no_grad and autocast")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)


def _modes() -> tuple[bool, bool, torch.dtype]:
    """What a `with` statement in a forward may change for the operations within."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def faithful_graph(
    model: nn.Module, tracer: Callable[[], fx.Tracer], modes: tuple[bool, ...] = (True, False)
) -> fx.Graph | None:
    """The graph of the model's forward; None where it has none, or none that holds for more than this one call.

    Tracing runs the forward once on symbols, and whatever Python decides on the way is decided for ever. So it is
    traced in train and in eval mode, which must agree, and each time it must leave the world as it found it. Nor may
    it change in place what it looks at again: the graph is for operations that each make a new value.
    modes: those that the graph is for, where it is not for both; True is train mode.
    """
    graphs = [_trace(model, tracer(), training) for training in modes]
    codes = {None if graph is None else graph.python_code("self").src for graph in graphs}
    return graphs[0] if len(codes) == 1 else None


def _trace(model: nn.Module, tracer: fx.Tracer, training: bool) -> fx.Graph | None:
    """A graph of a copy, so that neither modes nor what a forward leaves behind reach the model itself."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.training = training  # not by train(), which a class may have made to do more
    before = _state(model)
    with _randomness() as drawn:
        try:
            graph = tracer.trace(model)
        except Exception:  # whatever a forward may raise on symbolic values: such a model is not traceable
            return None
        if drawn():
            return None
    return graph if _same(before, _state(model)) and not is_overwritten(graph, model) else None


State = dict[tuple[str, str], tuple[Any, int]]


def _state(model: nn.Module) -> State:
    """Everything the modules hold, with the versions of tensors.

    A tensor that a forward makes (such as the dense weight of a packed layer) is stored by the tracer as an attribute
    of the model: it would stay what it was. A buffer that a forward changes in place is changed now and never again.
    """
    state: State = {}
    for name, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers, **module._modules}
        for key, value in held.items():
            state[name, key] = (value, value._version if isinstance(value, torch.Tensor) else 0)
    return state


def _same(before: State, after: State) -> bool:
    return before.keys() == after.keys() and all(
        value is after[key][0] and version == after[key][1] for key, (value, version) in before.items()
    )


@contextmanager
def _randomness() -> Iterator[Callable[[], bool]]:
    """Whether random numbers have been drawn within; afterwards they have not."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    before = _generators()
    try:
        yield lambda: _generators() != before
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002


def _generators() -> tuple[Any, ...]:
    """The states of the global generators, to compare."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), *rest
