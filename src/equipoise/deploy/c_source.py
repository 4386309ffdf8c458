"""Write a network as one C99 source file with its weights, for devices without Python."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from equipoise.deploy.blueprint import Network
from equipoise.deploy.coding import encode
from equipoise.deploy.fold import fold
from equipoise.deploy.graph import Graph, read_graph
from equipoise.errors import UserError
from equipoise.runtime.calls import IMAGE, Call, Shape, Window, constant

VALUE_TYPES = {"float32": "float", "int8": "int8_t"}
C_TYPES = {"float32": "float", "int8": "int8_t", "uint8": "uint8_t", "uint16": "uint16_t"}
LINE = 110  # characters


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
    return _Source(read_graph(model, input_shape), values).text()


class _Source:
    """The constants and the text of a graph."""

    def __init__(self, graph: Graph, values: str) -> None:
        self._graph, self._values = graph, values
        self._constants: list[str] = []
        self._bytes = 0

    def text(self) -> str:
        """Return the whole source."""
        network = self._graph.calls
        calls = [self._call(number, call) for number, call in enumerate(network.calls)]
        offsets, floats = _plan(network.calls, network.result)
        places = {IMAGE: "image", network.result: "scores"}
        places |= {number: f"memory + {offset}" for number, offset in offsets.items()}
        pointers = {f"@{number}@": place for number, place in places.items()}
        lines = [f"    {_with(pointers, line)};" for line in calls]
        note = f"/* {self._bytes:,} bytes of weights; {4 * floats:,} bytes of memory */"
        constants = [note, *self._constants, *([f"static float memory[{floats}];"] if floats else [])]
        scores = Shape(*network.calls[network.result].shape)
        parts = {
            "@IMAGE@": str(Shape(*network.image).size),
            "@SCORES@": str(scores.size),
            "@VALUE@": VALUE_TYPES[self._values],
            "@CONSTANTS@": "\n".join(constants),
            "@CALLS@": "\n".join(lines),
        }
        return _with(parts, files("equipoise.deploy").joinpath("network.c").read_text())

    def _call(self, number: int, call: Call) -> str:
        sources = [f"@{source}@" for source in call.inputs]
        between = [sources[0], _shape(call.shapes[0])] if call.window else sources
        arguments = [*between, f"@{number}@", _shape(call.shape), *self._arguments(number, call)]
        if call.function != "pool":
            arguments.append(str(int(call.relu)))
        return f"{call.function}({', '.join(arguments)})"

    def _arguments(self, number: int, call: Call) -> list[str]:
        if call.function == "affine":
            names = (constant(number, part) for part in ("scale", "shift"))
            return [self._array(self._graph.constants[name].numpy()) for name in names]
        if call.window is None:
            return []
        window = _window(call.window)
        if call.function == "convolve":
            return [self._weight(call.weight, call.bias), window]
        return [window, str(int(call.mean)), str(int(call.count_padding))]

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

    def _weight(self, weight: str, bias: str) -> str:
        tensors = self._graph.weights
        parts = encode(tensors[weight], self._values, gaps_only=True)
        names = {part: self._array(tensor.numpy()) for part, tensor in parts.items()}
        gaps = {1: "gaps8", 2: "gaps16"}[parts["gaps"].element_size()] if "gaps" in parts else ""
        fields = {"values": names["values"], "count": str(parts["values"].numel())}
        fields |= {gaps: names["gaps"]} if gaps else {}
        fields |= {"scale": names["scale"]} if "scale" in names else {}
        fields |= {"bias": self._array(tensors[bias].float().numpy())} if bias else {}
        inside = ", ".join(f".{name} = {value}" for name, value in fields.items())
        return f"&(const Weight){{{inside}}}"


def _shape(shape: Sequence[int]) -> str:
    return f"(Shape){{{', '.join(map(str, Shape(*shape)))}}}"


def _window(window: Window) -> str:
    pairs = (window.kernel, window.stride, window.padding, window.dilation)
    braces = ", ".join(f"{{{down}, {across}}}" for down, across in pairs)
    return f"&(const Window){{{braces}, {window.groups}}}"


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
            (offset, offset + Shape(*calls[other].shape).size)
            for other, offset in offsets.items()
            if last_use.get(other, other) >= number
        )
        size, place = Shape(*call.shape).size, 0
        for begin, stop in held:
            if place + size <= begin:
                break
            place = max(place, stop)
        offsets[number] = place
        end = max(end, place + size)
    return offsets, end
