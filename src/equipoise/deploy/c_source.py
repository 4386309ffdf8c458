"""Write a network as one C99 source file with its weights, for devices without Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx import Node

from equipoise.deploy.blueprint import Network
from equipoise.deploy.coding import encode
from equipoise.deploy.fold import fold
from equipoise.errors import UserError

VALUE_TYPES = {"float32": "float", "int8": "int8_t"}
C_TYPES = {"float32": "float", "int8": "int8_t", "uint8": "uint8_t", "uint16": "uint16_t"}
LINE = 110  # characters
aten = torch.ops.aten


def write_c(network: Network, path: Path, values: str = "float32") -> None:
    """Write a network as C source with the functions `predict` and `main`.

    Args:
        network: Blueprint and state_dict.
        path: The file.
        values: Type of the weights: `float32` or `int8`. Biases, norms and activations are always float32.

    Raises:
        UserError: If the model has an operation that the C source does not have.
    """
    model = network.build()
    fold(model)
    path.write_text(c_source(model, network.blueprint.input_shape, values))


def c_source(model: nn.Module, input_shape: Sequence[int], values: str = "float32") -> str:
    """Return the C source of a model in eval mode.

    Args:
        model: The model.
        input_shape: Shape of one image.
        values: Type of the weights: `float32` or `int8`.

    Raises:
        UserError: If the model has an operation that the C source does not have, or several outputs.
    """
    if values not in VALUE_TYPES:
        raise UserError(f"C source stores {' or '.join(VALUE_TYPES)}, not {values}")
    return _Source(model, tuple(input_shape), values).text()


class Shape(NamedTuple):
    """Channels, height and width of a value; a vector is channels of one pixel."""

    channels: int
    height: int = 1
    width: int = 1

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width

    def __str__(self) -> str:
        return f"(Shape){{{self.channels}, {self.height}, {self.width}}}"


@dataclass
class Call:
    """A call of a function of `network.c`.

    Attributes:
        function: Its name.
        inputs: The calls whose results it reads; -1 is the image.
        shapes: The shapes of the inputs, as the call reads them.
        shape: The shape of the result.
        arguments: The C expressions of the remaining arguments.
        affine: Scale and shift of the function `affine`.
        relu: Whether the result goes through a ReLU.
    """

    function: str
    inputs: list[int]
    shapes: list[Shape]
    shape: Shape
    arguments: list[str] = field(default_factory=list)
    affine: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    relu: bool = False


class _Source:
    """The calls and the constants of a model; nodes of torch.fx are untyped, since their arguments are."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, ...], values: str) -> None:
        self._values = values
        self._calls: list[Call] = []
        self._found: dict[Node, tuple[int, Shape]] = {}  # call and shape of each value
        self._constants: list[str] = []
        self._bytes = 0
        program = _exported(model, input_shape)
        signature = program.graph_signature
        stored = {**program.state_dict, **program.constants}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names |= signature.inputs_to_lifted_tensor_constants
        self._tensors: dict[Node, Tensor] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                self._tensors[node] = stored[names[node.name]].detach()
            elif node.op == "placeholder":
                self._image = self._shape(node)
                self._found[node] = (-1, self._image)
            elif node.op == "call_function":
                self._read(node)
        results = [found for node, found in self._found.items() if node.name in signature.user_outputs]
        if len(signature.user_outputs) != 1 or not results or results[0][0] < 0:
            raise UserError("C source has networks with one result, which is computed from the image")
        self._result, self._scores = results[0]

    # Reading the graph

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

    def _add(self, node: Node, function: str, sources: Iterable[Node], *arguments: str, **fields: Any) -> None:
        found = [self._found[source] for source in sources]
        call = Call(function, [i for i, _ in found], [s for _, s in found], self._shape(node), [*arguments], **fields)
        self._found[node] = (len(self._calls), call.shape)
        self._calls.append(call)

    def _call_of(self, source: Node) -> Call | None:
        """The call that computes a value, if the coming operation alone reads it and may be merged into the call."""
        number, shape = self._found[source]
        names = [node for node, (other, _) in self._found.items() if other == number]
        alone = number >= 0 and all(len(node.users) == 1 for node in names)
        return self._calls[number] if alone and self._calls[number].shape == shape else None

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
        self._add(node, "convolve", [source], self._weight(weight, bias), window)

    def linear(self, node: Any) -> None:
        source, weight, bias = _completed(node, None, least=2)
        if len(source.meta["val"].shape) != 2:
            raise UserError("C source has linear layers of vectors, not of sequences")
        self._add(node, "convolve", [source], self._weight(weight, bias), _window((1, 1)))

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
        number, one = self._vector(right), np.ones(1)
        scale, shift = {
            aten.add.Tensor: (one, number),
            aten.sub.Tensor: (one, -number),
            aten.mul.Tensor: (number, 0 * one),
            aten.div.Tensor: (1 / number, 0 * one),
        }[node.target]
        self._affine(node, left, scale, shift)

    def _affine(self, node: Node, source: Node, scale: NDArray[np.float64], shift: NDArray[np.float64]) -> None:
        channels = (self._shape(node).channels,)
        scale, shift = np.broadcast_to(scale, channels), np.broadcast_to(shift, channels)
        before = self._call_of(source)
        if before is not None and before.affine is not None and not before.relu:
            inner, offset = before.affine
            before.affine = (inner * scale, offset * scale + shift)
            self._found[node] = self._found[source]
        else:
            self._add(node, "affine", [source], affine=(scale, shift))

    def relu(self, node: Any) -> None:
        source = node.args[0]
        before = self._call_of(source)
        if before is not None and before.function in ("convolve", "affine", "add"):
            before.relu = True
            self._found[node] = self._found[source]
        else:
            one = np.ones(self._shape(node).channels)
            self._add(node, "affine", [source], affine=(one, 0 * one), relu=True)

    def max_pool(self, node: Any) -> None:
        source, kernel, stride, padding, dilation, _ = _completed(node, None, 0, 1, False, least=2)
        window = _window(kernel, stride or kernel, padding, dilation)
        self._add(node, "pool", [source], window, "0", "0")

    def avg_pool(self, node: Any) -> None:
        source, kernel, stride, padding, ceil, count, divisor = _completed(node, None, 0, False, True, None, least=2)
        if ceil or divisor is not None:
            raise UserError("C source has no avg_pool2d with ceil_mode or divisor_override")
        window = _window(kernel, stride or kernel, padding)
        self._add(node, "pool", [source], window, "1", str(int(count)))

    def adaptive_pool(self, node: Any) -> None:
        source = node.args[0]
        shape, out = self._found[source][1], self._shape(node)
        if shape.height % out.height or shape.width % out.width:
            raise UserError(f"C source has no average of {shape[1:]} pixels to {out[1:]}: they do not divide")
        kernel = (shape.height // out.height, shape.width // out.width)
        self._add(node, "pool", [source], _window(kernel, kernel), "1", "0")

    def mean(self, node: Any) -> None:
        source, dims = node.args[:2]
        if {dim % 4 for dim in dims} != {2, 3} or len(source.meta["val"].shape) != 4:
            raise UserError("C source has means over the height and width of images only")
        kernel = self._found[source][1][1:]
        self._add(node, "pool", [source], _window(kernel, kernel), "1", "0")

    # Constants

    def _tensor(self, node: Any) -> Tensor:
        if node not in self._tensors:
            raise UserError("C source has layers with constant weights only")
        return self._tensors[node]

    def _vector(self, value: Any) -> NDArray[np.float64]:
        if isinstance(value, int | float):
            return np.array([float(value)])
        tensor = self._tensor(value)
        if tensor.numel() != max(tensor.shape, default=1) or (tensor.dim() > 1 and tensor.numel() != tensor.shape[1]):
            raise UserError(f"C source has constants with one number per channel, not of {tuple(tensor.shape)}")
        return tensor.double().flatten().numpy()

    def _array(self, numbers: NDArray[Any]) -> str:
        """Define an array, and return its name."""
        name, kind = f"c{len(self._constants)}", C_TYPES[numbers.dtype.name]
        text = [f"{number!s}f" if kind == "float" else str(number) for number in numbers]
        lines = [f"static const {kind} {name}[{max(1, len(text))}] = {{"]
        for number in text or ["0"]:
            if len(lines[-1]) + len(number) > LINE:
                lines.append("")
            lines[-1] += f"{number},"
        self._constants.append("\n".join([*lines, "};"]))
        self._bytes += numbers.nbytes
        return name

    def _weight(self, weight: Any, bias: Any) -> str:
        parts = encode(self._tensor(weight), self._values, gaps_only=True)
        names = {part: self._array(tensor.numpy()) for part, tensor in parts.items()}
        gaps = {1: "gaps8", 2: "gaps16"}[parts["gaps"].element_size()] if "gaps" in parts else ""
        fields = {"values": names["values"], "count": str(parts["values"].numel())}
        fields |= {gaps: names["gaps"]} if gaps else {}
        fields |= {"scale": names["scale"]} if "scale" in names else {}
        fields |= {"bias": self._array(self._tensor(bias).float().numpy())} if bias is not None else {}
        inside = ", ".join(f".{name} = {value}" for name, value in fields.items())
        return f"&(const Weight){{{inside}}}"

    # Writing

    def text(self) -> str:
        calls = [self._call(number, call) for number, call in enumerate(self._calls)]
        offsets, floats = _plan(self._calls, self._result)
        places = {-1: "image", self._result: "scores"}
        places |= {number: f"memory + {offset}" for number, offset in offsets.items()}
        pointers = {f"@{number}@": place for number, place in places.items()}
        lines = [f"    {_with(pointers, line)};" for line in calls]
        note = f"/* {self._bytes:,} bytes of weights; {4 * floats:,} bytes of memory */"
        constants = [note, *self._constants, *([f"static float memory[{floats}];"] if floats else [])]
        sizes = {"@IMAGE@": str(self._image.size), "@SCORES@": str(self._scores.size)}
        parts = {
            "@VALUE@": VALUE_TYPES[self._values],
            "@CONSTANTS@": "\n".join(constants),
            "@CALLS@": "\n".join(lines),
        }
        template = files("equipoise.deploy").joinpath("network.c").read_text()
        return _with({**sizes, **parts}, template)

    def _call(self, number: int, call: Call) -> str:
        arguments = call.arguments
        if call.affine is not None:
            arguments = [self._array(part.astype(np.float32)) for part in call.affine]
        sources = [f"@{source}@" for source in call.inputs]
        between = [sources[0], str(call.shapes[0])] if call.function in ("convolve", "pool") else sources
        relu = [] if call.function == "pool" else [str(int(call.relu))]
        return f"{call.function}({', '.join([*between, f'@{number}@', str(call.shape), *arguments, *relu])})"


HANDLERS: dict[Any, Callable[[_Source, Any], None]] = {
    aten.conv2d.default: _Source.convolution,
    aten.linear.default: _Source.linear,
    aten._native_batch_norm_legit_no_training.default: _Source.norm,
    getitem: _Source.first,
    aten.relu.default: _Source.relu,
    aten.max_pool2d.default: _Source.max_pool,
    aten.avg_pool2d.default: _Source.avg_pool,
    aten.adaptive_avg_pool2d.default: _Source.adaptive_pool,
    aten.mean.dim: _Source.mean,
    aten.view.default: _Source.alias,
    aten.reshape.default: _Source.alias,
    aten.flatten.using_ints: _Source.alias,
    aten.clone.default: _Source.alias,
    aten.add.Tensor: _Source.arithmetic,
    aten.sub.Tensor: _Source.arithmetic,
    aten.mul.Tensor: _Source.arithmetic,
    aten.div.Tensor: _Source.arithmetic,
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


def _pair(numbers: int | Sequence[int]) -> list[int]:
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return given * 2 if len(given) == 1 else given


def _window(kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> str:
    pairs = (_pair(numbers) for numbers in (kernel, stride, padding, dilation))
    braces = ", ".join(f"{{{down}, {across}}}" for down, across in pairs)
    return f"&(const Window){{{braces}, {groups}}}"


def _with(replacements: dict[str, str], text: str) -> str:
    for mark, replacement in replacements.items():
        text = text.replace(mark, replacement)
    return text


def _plan(calls: Sequence[Call], result: int) -> tuple[dict[int, int], int]:
    """Offsets of the results of calls in one block of memory, and its size in floats; the last result is elsewhere.

    Results that are needed at the same time do not overlap. Each gets the lowest free offset.
    """
    last_use = {source: number for number, call in enumerate(calls) for source in call.inputs}
    offsets: dict[int, int] = {}
    end = 0
    for number, call in enumerate(calls):
        if number == result:
            continue
        held = sorted(
            (offset, offset + calls[other].shape.size)
            for other, offset in offsets.items()
            if last_use.get(other, other) >= number
        )
        place = 0
        for begin, stop in held:
            if place + call.shape.size <= begin:
                break
            place = max(place, stop)
        offsets[number] = place
        end = max(end, place + call.shape.size)
    return offsets, end
