"""Read a model as calls of a few functions, by torch.export: for C source and for the runtime without torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx import Node

from equipoise.errors import UserError
from equipoise.runtime.calls import IMAGE, Call, Calls, Shape, Window, constant

aten = torch.ops.aten


@dataclass(frozen=True)
class Graph:
    """A model as calls.

    Attributes:
        calls: The calls.
        weights: Weights and biases of the model that the calls name.
        constants: Scales and shifts of the calls of `affine`, float32.
    """

    calls: Calls
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


def read_graph(model: nn.Module, input_shape: Sequence[int]) -> Graph:
    """Read the calls of a model in eval mode.

    Args:
        model: The model.
        input_shape: Shape of one image.

    Raises:
        UserError: If the model has an operation that C source and the runtime do not have, or several outputs.
    """
    return _Reader(model, tuple(input_shape)).graph()


class _Reader:
    """The calls and the constants of a model; nodes of torch.fx are untyped, since their arguments are."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, ...]) -> None:
        self._calls: list[Call] = []
        self._affines: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}  # scale and shift of calls
        self._found: dict[Node, tuple[int, Shape]] = {}  # call and shape of each value
        program = _exported(model, input_shape)
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names |= signature.inputs_to_lifted_tensor_constants
        self._stored = {**program.state_dict, **program.constants}
        self._names = {node: names[node.name] for node in program.graph.nodes if node.name in names}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node not in self._names:
                self._image = self._shape(node)
                self._found[node] = (IMAGE, self._image)
            elif node.op == "call_function":
                self._read(node)
        results = [found for node, found in self._found.items() if node.name in signature.user_outputs]
        if len(signature.user_outputs) != 1 or not results or results[0][0] == IMAGE:
            raise UserError("C source has networks with one result, which is computed from the image")
        self._result = results[0][0]

    def graph(self) -> Graph:
        used = {name for call in self._calls for name in (call.weight, call.bias) if name}
        constants = {
            constant(number, part): torch.from_numpy(numbers.astype(np.float32))
            for number, affine in self._affines.items()
            for part, numbers in zip(("scale", "shift"), affine, strict=True)
        }
        calls = Calls(self._image, tuple(self._calls), self._result)
        return Graph(calls, {name: self._stored[name].detach() for name in used}, constants)

    def _read(self, node: Node) -> None:
        handler = HANDLERS.get(node.target)
        if handler is None:
            known = ", ".join(sorted({_operation(target) for target in HANDLERS}))
            raise UserError(f"C source has no operation {_operation(node.target)}; it has {known}")
        handler(self, node)

    def _shape(self, node: Node) -> Shape:
        shape = tuple(node.meta["val"].shape)
        if len(shape) not in (2, 4) or shape[0] != 1:
            raise UserError(f"C source has images and vectors, not values of the shape {shape[1:]}")
        return Shape(*shape[1:])

    def _add(self, node: Node, function: Any, sources: Iterable[Node], **fields: Any) -> None:
        numbers, shapes = zip(*(self._found[source] for source in sources), strict=True)
        call = Call(function, numbers, shapes, self._shape(node), **fields)
        self._found[node] = (len(self._calls), self._shape(node))
        self._calls.append(call)

    def _call_of(self, source: Node) -> int | None:
        """The call that computes a value, if the next operation alone reads it and may be merged into the call."""
        number, shape = self._found[source]
        names = [node for node, (other, _) in self._found.items() if other == number]
        alone = number != IMAGE and all(len(node.users) == 1 for node in names)
        return number if alone and self._calls[number].shape == shape else None

    def alias(self, node: Any) -> None:
        """Another shape of the same numbers."""
        number, _ = self._found[node.args[0]]
        self._found[node] = (number, self._shape(node))

    def first(self, node: Any) -> None:
        """The first result of an operation; the others are not used in eval mode."""
        self._found[node] = self._found[node.args[0]]

    def convolution(self, node: Any) -> None:
        source, weight, bias, stride, padding, dilation, groups = _completed(node, None, 1, 0, 1, 1, least=2)
        kernel = self._tensor(weight).shape[2:]
        if isinstance(padding, str):
            raise UserError(f'C source has no padding "{padding}"; give it as a number')
        window = _window(kernel, stride, padding, dilation, groups)
        self._convolve(node, source, weight, bias, window)

    def linear(self, node: Any) -> None:
        source, weight, bias = _completed(node, None, least=2)
        if len(source.meta["val"].shape) != 2:
            raise UserError("C source has linear layers of vectors, not of sequences")
        self._convolve(node, source, weight, bias, _window((1, 1)))

    def _convolve(self, node: Node, source: Node, weight: Any, bias: Any, window: Window) -> None:
        names = {"weight": self._name(weight), "bias": "" if bias is None else self._name(bias)}
        self._add(node, "convolve", [source], window=window, **names)

    def norm(self, node: Any) -> None:
        source, weight, bias, mean, variance, _, eps = node.args
        scale = 1 / np.sqrt(self._vector(variance) + eps)
        if weight is not None:
            scale = scale * self._vector(weight)
        shift = -self._vector(mean) * scale
        if bias is not None:
            shift = shift + self._vector(bias)
        node.meta["val"] = node.meta["val"][0]
        self._affine(node, source, scale, shift)

    def arithmetic(self, node: Any) -> None:
        """An operation of a value and a constant, or the sum of two values."""
        left, right = node.args
        if node.target is aten.add.Tensor and left in self._found and right in self._found:
            self._add(node, "add", [left, right])
            return
        if left not in self._found or right in self._found or node.kwargs:
            raise UserError(f"C source has {_operation(node.target)} only with a constant on its right side")
        number, one, zero = self._vector(right), np.ones(1), np.zeros(1)
        with np.errstate(divide="ignore"):
            divided = 1 / number  # used for `div` only
        scale, shift = {
            aten.add.Tensor: (one, number),
            aten.sub.Tensor: (one, -number),
            aten.mul.Tensor: (number, zero),
            aten.div.Tensor: (divided, zero),
        }[node.target]
        self._affine(node, left, scale, shift)

    def _affine(self, node: Node, source: Node, scale: NDArray[np.float64], shift: NDArray[np.float64]) -> None:
        channels = (self._shape(node).channels,)
        scale, shift = np.broadcast_to(scale, channels), np.broadcast_to(shift, channels)
        before = self._call_of(source)
        if before is not None and before in self._affines and not self._calls[before].relu:
            inner, offset = self._affines[before]
            self._affines[before] = (inner * scale, offset * scale + shift)
            self._found[node] = self._found[source]
        else:
            self._affines[len(self._calls)] = (scale, shift)
            self._add(node, "affine", [source])

    def relu(self, node: Any) -> None:
        source = node.args[0]
        before = self._call_of(source)
        if before is not None and self._calls[before].function != "pool":
            self._calls[before].relu = True
            self._found[node] = self._found[source]
        else:
            one = np.ones(self._shape(node).channels)
            self._affines[len(self._calls)] = (one, 0 * one)
            self._add(node, "affine", [source], relu=True)

    def max_pool(self, node: Any) -> None:
        source, kernel, stride, padding, dilation, _ = _completed(node, None, 0, 1, False, least=2)
        window = _window(kernel, stride or kernel, padding, dilation)
        self._add(node, "pool", [source], window=window)

    def avg_pool(self, node: Any) -> None:
        source, kernel, stride, padding, ceil, count, divisor = _completed(node, None, 0, False, True, None, least=2)
        if ceil or divisor is not None:
            raise UserError("C source has no avg_pool2d with ceil_mode or divisor_override")
        window = _window(kernel, stride or kernel, padding)
        self._add(node, "pool", [source], window=window, mean=True, count_padding=count)

    def adaptive_pool(self, node: Any) -> None:
        source = node.args[0]
        shape, out = self._found[source][1], self._shape(node)
        if shape.height % out.height or shape.width % out.width:
            raise UserError(f"C source has no average of {shape[1:]} pixels to {out[1:]}: they do not divide")
        kernel = (shape.height // out.height, shape.width // out.width)
        self._add(node, "pool", [source], window=_window(kernel, kernel), mean=True)

    def mean(self, node: Any) -> None:
        source, dims = node.args[:2]
        if {dim % 4 for dim in dims} != {2, 3} or len(source.meta["val"].shape) != 4:
            raise UserError("C source has means over the height and width of images only")
        kernel = self._found[source][1][1:]
        self._add(node, "pool", [source], window=_window(kernel, kernel), mean=True)

    # Constants

    def _name(self, node: Any) -> str:
        if node not in self._names:
            raise UserError("C source has layers with constant weights only")
        return self._names[node]

    def _tensor(self, node: Any) -> Tensor:
        return self._stored[self._name(node)].detach()

    def _vector(self, value: Any) -> NDArray[np.float64]:
        if isinstance(value, int | float):
            return np.array([float(value)])
        tensor = self._tensor(value)
        if tensor.numel() != max(tensor.shape, default=1) or (tensor.dim() > 1 and tensor.numel() != tensor.shape[1]):
            raise UserError(f"C source has constants with one number per channel, not of {tuple(tensor.shape)}")
        return tensor.double().flatten().numpy()


HANDLERS: dict[Any, Callable[[_Reader, Any], None]] = {
    aten.conv2d.default: _Reader.convolution,
    aten.linear.default: _Reader.linear,
    aten._native_batch_norm_legit_no_training.default: _Reader.norm,
    getitem: _Reader.first,
    aten.relu.default: _Reader.relu,
    aten.max_pool2d.default: _Reader.max_pool,
    aten.avg_pool2d.default: _Reader.avg_pool,
    aten.adaptive_avg_pool2d.default: _Reader.adaptive_pool,
    aten.mean.dim: _Reader.mean,
    aten.view.default: _Reader.alias,
    aten.reshape.default: _Reader.alias,
    aten.flatten.using_ints: _Reader.alias,
    aten.clone.default: _Reader.alias,
    aten.add.Tensor: _Reader.arithmetic,
    aten.sub.Tensor: _Reader.arithmetic,
    aten.mul.Tensor: _Reader.arithmetic,
    aten.div.Tensor: _Reader.arithmetic,
}


def _exported(model: nn.Module, input_shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """The graph of a model without in-place operations."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model.eval(), (torch.zeros(1, *input_shape),)).run_decompositions({})
    except Exception as error:  # torch.export raises exceptions without a common base
        line = " ".join(str(error).split())[:200]
        raise UserError(f"torch.export cannot trace the model: {line}") from None


def _completed(node: Any, *defaults: Any, least: int) -> list[Any]:
    """The arguments of a node, with the defaults of those after the first `least`."""
    return [*node.args, *defaults[len(node.args) - least :]]


def _operation(target: Any) -> str:
    return str(target).removeprefix("aten.").split(".")[0].lstrip("_") if target is not getitem else "getitem"


def _pair(numbers: int | Sequence[int]) -> tuple[int, int]:
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return (given[0], given[-1])


def _window(kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Window:
    return Window(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), groups)
