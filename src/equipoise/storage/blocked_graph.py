"""Convert a traced model to the blocked layout. Operations without a blocked form get plain tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node

from equipoise.kernels import operators
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.storage.blocked_norm import BlockedBatchNorm
from equipoise.storage.packed_modules import PackedConv1d, PackedConv2d, PackedLayer

RELU = {F.relu, torch.relu, torch.relu_, "relu", "relu_"}
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
BLOCKED = (operators.relu, operators.max_pool, operators.add, operators.avg_pool, operators.flatten)
BORDERED = {to_blocked, operators.relu, operators.max_pool, operators.add}


def blocked_graph(
    graph: fx.Graph, model: nn.Module, plain: frozenset[str], dtype: torch.dtype = torch.float32
) -> fx.Graph:
    """Return a graph of the same function, with packed layers and the operations around them in the blocked layout.

    Args:
        graph: The graph of a packed model.
        model: The model.
        plain: Packed layers that take plain tensors, by name.
        dtype: Type of the blocked activations.
    """
    new = _Converter(graph, model, plain, dtype).run()
    modules = dict(model.named_modules())
    _fuse(new, modules)
    _set_borders(new, {name: module for name, module in modules.items() if name not in plain})
    new.lint()
    return new


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


class _Converter:
    """Copies a graph node by node and records which values are blocked."""

    def __init__(self, graph: fx.Graph, model: nn.Module, plain: frozenset[str], dtype: torch.dtype) -> None:
        self.options: dict[str, Any] = {} if dtype is torch.float32 else {"dtype": dtype}
        self.old, self.modules, self.layers_left_plain = graph, dict(model.named_modules()), plain
        self.new = fx.Graph()
        self.plain: dict[Node, Node] = {}
        self.blocked: dict[Node, Node] = {}

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            converted = self._convert(node)
            if converted is not None:
                self.blocked[node] = converted
            else:
                self.plain[node] = self.new.node_copy(node, self._as_plain)
        return self.new

    def _as_plain(self, node: Node) -> Node:
        if node not in self.plain:
            self.plain[node] = self.new.call_function(from_blocked, (self.blocked[node],))
        return self.plain[node]

    def _as_blocked(self, node: Node) -> Node:
        if node not in self.blocked:
            self.blocked[node] = self.new.call_function(to_blocked, (self.plain[node],), self.options)
        return self.blocked[node]

    def _convert(self, node: Node) -> Node | None:
        """The node in blocked form; `None` if it has none or its input is not blocked."""
        if node.op == "call_module":
            return self._convert_module(node, self.modules[str(node.target)])
        if node.op not in ("call_function", "call_method"):
            return None
        inputs = [argument for argument in node.args if isinstance(argument, Node)]
        if not inputs or any(argument not in self.blocked for argument in inputs):
            return None
        form = _blocked_call(node)
        if form is None:
            return None
        target, extra = form
        return self.new.call_function(target, tuple(self.blocked[i] for i in inputs), extra)

    def _convert_module(self, node: Node, module: nn.Module) -> Node | None:
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
            return None
        source = node.args[0]
        if isinstance(module, PackedLayer) and node.target not in self.layers_left_plain:
            return self.new.call_module(str(node.target), (self._as_blocked(source),))
        if source not in self.blocked:
            return None
        if isinstance(module, BlockedBatchNorm):
            return self.new.call_module(str(node.target), (self.blocked[source],))
        if type(module) is nn.Identity:
            return self.blocked[source]
        form = _blocked_module(module)
        return None if form is None else self.new.call_function(form[0], (self.blocked[source],), form[1])


Form = tuple[Callable[..., Any], dict[str, Any]]  # a blocked operation and its options


def _max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Form | None:
    """Blocked form of torch's max_pool2d; `None` unless its windows are 2x2 with stride 2."""
    windows = (kernel_size, stride or kernel_size, padding, dilation)
    usual = [_pair(value) for value in windows] == [(2, 2), (2, 2), (0, 0), (1, 1)]
    return (operators.max_pool, {}) if usual and not ceil_mode and not return_indices else None


def _avg_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Form | None:
    """Blocked form of torch's avg_pool2d; `None` unless its windows tile the map."""
    kernel = _pair(kernel_size)
    usual = _pair(stride or kernel_size) == kernel and _pair(padding) == (0, 0)
    return (operators.avg_pool, {"kernel": kernel}) if usual and not ceil_mode and not divisor_override else None


def _global_pool(output_size: Any) -> Form | None:
    return (operators.avg_pool, {}) if output_size in (1, (1, 1)) else None


def _flatten(start_dim: int = 0, end_dim: int = -1) -> Form | None:
    return (operators.flatten, {}) if (start_dim, end_dim) == (1, -1) else None


def _blocked_module(module: nn.Module) -> Form | None:
    if type(module) is nn.ReLU:
        return operators.relu, {}
    if type(module) is nn.MaxPool2d:
        windows = (module.kernel_size, module.stride, module.padding, module.dilation)
        return _max_pool(*windows, module.ceil_mode, module.return_indices)
    if type(module) is nn.AvgPool2d:
        sizes = (module.kernel_size, module.stride, module.padding)
        return _avg_pool(*sizes, module.ceil_mode, divisor_override=module.divisor_override)
    if type(module) is nn.AdaptiveAvgPool2d:
        return _global_pool(module.output_size)
    if type(module) is nn.Flatten:
        return _flatten(module.start_dim, module.end_dim)
    return None


CALLS: dict[Any, Callable[..., Form | None]] = {
    F.max_pool2d: _max_pool,
    F.avg_pool2d: _avg_pool,
    F.adaptive_avg_pool2d: _global_pool,
    torch.flatten: _flatten,
    "flatten": _flatten,
}


def _blocked_call(node: Node) -> Form | None:
    target, rest, options = node.target, node.args[1:], dict(node.kwargs)
    options.pop("inplace", None)
    if target in RELU and not rest and not options:
        return operators.relu, {}
    if target in ADD and len(rest) == 1 and isinstance(rest[0], Node) and not options:
        return operators.add, {}
    return CALLS[target](*rest, **options) if target in CALLS else None


def _fuse(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Fuse norm + add + ReLU + pool into one pass, and likewise add + ReLU and ReLU + pool."""
    for node in list(graph.nodes):
        if _is_norm(node, modules):
            while _absorb(node, graph):
                pass
        elif node.target is operators.add:
            _absorb(node, graph)
        elif node.target is operators.relu and _only_user(node) is operators.max_pool:
            user = next(iter(node.users))
            user.args = node.args
            user.kwargs = {"relu": True}
            graph.erase_node(node)


def _is_norm(node: Node, modules: dict[str, nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], BlockedBatchNorm)


def _only_user(node: Node) -> Any:
    return next(iter(node.users)).target if len(node.users) == 1 else None


def _absorb(node: Node, graph: fx.Graph) -> bool:
    """Fuse the only user of `node` into it if one pass can do both in this order."""
    done, target = dict(node.kwargs), _only_user(node)
    taken: dict[str, Any]
    if target is operators.relu and not {"relu", "pool"} & done.keys():
        taken = {"relu": True}
    elif target is operators.max_pool and node.op == "call_module" and not {"residual", "pool"} & done.keys():
        taken = {"pool": True}
    elif target is operators.add and node.op == "call_module" and not done:
        other = [argument for argument in next(iter(node.users)).args if argument is not node]
        if len(other) != 1:
            return False
        taken = {"residual": other[0]}
    else:
        return False
    user = next(iter(node.users))
    if "residual" in taken:
        user.prepend(node)
    user.replace_all_uses_with(node)
    graph.erase_node(user)
    node.kwargs = {**done, **taken}
    return True


def _set_borders(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Let each producer write its result inside the border that the next convolutions read."""
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if node.target in BORDERED or isinstance(module, (BlockedBatchNorm, PackedConv1d, PackedConv2d)):
            wanted = [_padding(user, modules) for user in node.users]
            border = (max((w[0] for w in wanted), default=0), max((w[1] for w in wanted), default=0))
            if border != (0, 0):
                node.kwargs = {**node.kwargs, "border": border}


def _padding(node: Node, modules: dict[str, nn.Module]) -> tuple[int, int]:
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    return module.shape.padding if isinstance(module, PackedLayer) else (0, 0)
