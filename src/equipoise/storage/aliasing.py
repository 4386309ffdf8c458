"""Find in-place operations of a traced forward whose effect is read elsewhere.

In the blocked layout every operation makes a new value. An operation that changes its input can be converted only if
nothing reads that input afterwards, neither by its name nor through a view.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd

from equipoise.storage.packed_modules import PackedLayer

# Modules and functions that always return a new tensor. All others may return their input or a view of it.
FRESH_MODULES = (
    PackedLayer, _ConvNd, nn.Linear, nn.Bilinear, nn.Embedding,
    _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
    _AvgPoolNd, _AdaptiveAvgPoolNd, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.LPPool1d, nn.LPPool2d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip
FRESH_CALLS = frozenset({
    "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "rdiv", "rtruediv", "floordiv", "mod", "pow",
    "rpow", "neg", "abs", "square", "sqrt", "rsqrt", "exp", "log", "clamp", "clip", "maximum", "minimum",
    "where", "matmul", "mm", "bmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "batch_norm", "layer_norm", "group_norm", "instance_norm", "max_pool1d", "max_pool2d",
    "max_pool3d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_max_pool2d", "interpolate", "mean", "sum", "amax", "amin", "std", "var", "cat", "concat", "stack",
    "clone", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardtanh",
    "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "softmax", "log_softmax",
    "scaled_dot_product_attention",
})  # fmt: skip
# Methods and attributes that describe a tensor and return no tensor
DESCRIBING = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device", "is_floating_point",
    "element_size",
})  # fmt: skip
DESCRIBING_ATTRIBUTES = frozenset({
    "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "itemsize", "nbytes",
})  # fmt: skip
# Python's in-place operators, by their names in `operator`
IN_PLACE = frozenset({
    "iadd", "iand", "ifloordiv", "ilshift", "imod", "imul", "imatmul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor", "setitem",
})  # fmt: skip


def is_overwritten(graph: fx.Graph, model: nn.Module) -> bool:
    """Return whether a value is read after an in-place operation changed it, except as the result of that operation."""
    modules = dict(model.named_modules())
    group: dict[Node, set[Node]] = {}  # nodes that may share memory with each node
    stale: set[Node] = set()  # nodes whose memory was changed after they were computed
    for node in graph.nodes:
        if not stale.isdisjoint(node.all_input_nodes):
            return True
        for changed in _changed(node, modules):
            if any(other.op in ("placeholder", "get_attr") for other in group[changed]):
                return True  # the caller or the next call reads this memory
            stale |= group[changed]
        shared = {node}.union(*(group[source] for source in _aliased(node, modules)))
        group.update((member, shared) for member in shared)
    return False


def _changed(node: Node, modules: dict[str, nn.Module]) -> list[Node]:
    """Inputs that a node changes or may change."""
    if _is_foreign(node) or node.kwargs.get("out") is not None:
        return node.all_input_nodes
    if not _is_in_place(node, modules):
        return []
    return [node.args[0]] if node.args and isinstance(node.args[0], Node) else node.all_input_nodes


def _aliased(node: Node, modules: dict[str, nn.Module]) -> list[Node]:
    """Inputs that the result of a node may share memory with."""
    if changed := _changed(node, modules):
        return changed
    return [] if _is_fresh(node, modules) else node.all_input_nodes


def _is_in_place(node: Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node has the option `inplace` or a name that ends in an underscore, by torch's conventions."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node.target)
    return name in IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace"))


def _is_fresh(node: Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], FRESH_MODULES)
    if node.target is getattr:
        return node.args[1] in DESCRIBING_ATTRIBUTES
    return node.op in ("call_function", "call_method") and _name(node.target) in FRESH_CALLS | DESCRIBING


def _is_foreign(node: Node) -> bool:
    """Whether a function is from outside Python and torch, and may therefore change its arguments."""
    if node.op != "call_function":
        return False
    module = getattr(node.target, "__module__", None) or "torch"  # torch's built-in functions have no module
    return module.startswith(("torch.ops", "torch._ops")) or module.partition(".")[0] not in (
        "torch", "_operator", "builtins", "math",
    )  # fmt: skip


def _name(target: Any) -> str:
    """Name of a function or method; `iadd` for `__iadd__`."""
    name: str = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_") if name.startswith("__") else name
