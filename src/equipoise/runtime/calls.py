"""The calls of functions that a network consists of: files store them, C source and the runtime execute them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from equipoise.errors import UserError
from equipoise.kernels.geometry import ConvShape, Pair

IMAGE = -1  # as an input of a call
PREFIX = "program/"  # of the names of tensors that belong to the program, not to the model
# Limits of what a file may ask for; their products fit the integers of the kernels
LARGEST_VALUE = 2**26  # numbers in the result of a call
LARGEST_WINDOW = 2**10
LARGEST_STRIDE = 64


class Shape(NamedTuple):
    """Channels, height and width of a value; a vector is channels of one pixel."""

    channels: int
    height: int = 1
    width: int = 1

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Window:
    """Windows of a convolution or of pooling: rows and columns of each option."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        pairs = (self.kernel, self.stride, self.padding, self.dilation)
        if any(len(pair) != 2 for pair in pairs):
            raise UserError("a window has rows and columns")
        if min(*self.kernel, *self.stride, *self.dilation, self.groups) < 1 or min(self.padding) < 0:
            raise UserError(f"no window has this geometry: {self}")

    def check_size(self) -> None:
        """Raise a `UserError` for numbers that are too large for the kernels."""
        if max(*self.kernel, *self.padding, *self.dilation) > LARGEST_WINDOW or max(self.stride) > LARGEST_STRIDE:
            raise UserError(f"windows of more than {LARGEST_WINDOW} pixels, or strides above {LARGEST_STRIDE}")


@dataclass
class Call:
    """A call of a function.

    Attributes:
        function: `convolve`, `affine` (y = scale x + shift per channel), `add` or `pool`.
        inputs: The calls whose results it reads; -1 is the image.
        shapes: The shapes of the inputs, as the call reads them.
        shape: The shape of the result.
        window: Windows of `convolve` and `pool`.
        weight: Name of the weight of `convolve`.
        bias: Name of its bias; empty if it has none.
        mean: Whether `pool` takes means instead of the largest numbers.
        count_padding: Whether padding counts in means as zeros.
        relu: Whether the result goes through a ReLU.
    """

    function: Literal["convolve", "affine", "add", "pool"]
    inputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    window: Window | None = None
    weight: str = ""
    bias: str = ""
    mean: bool = False
    count_padding: bool = False
    relu: bool = False

    def conv_shape(self) -> ConvShape:
        """Return the geometry of a `convolve`."""
        if self.window is None:
            raise UserError("a convolution has a window")
        w, channels = self.window, (self.shape[0], self.shapes[0][0])
        return ConvShape(*channels, w.kernel, w.stride, w.padding, w.dilation, w.groups)

    def check(self) -> None:
        """Raise a `UserError` unless the function gives a result of `shape` for inputs of `shapes`."""
        count = 2 if self.function == "add" else 1
        if len(self.inputs) != count or len(self.shapes) != count:
            raise UserError(f"{self.function} has {count} inputs with shapes")
        for shape in (*self.shapes, self.shape):
            _check_shape(shape)
        if self.window is not None:
            self.window.check_size()
        if not self._fits(Shape(*self.shapes[0]), Shape(*self.shape)):
            raise UserError(f"{self.function} of {list(self.shapes[0])} does not give {list(self.shape)}")

    def _fits(self, given: Shape, result: Shape) -> bool:
        if self.function == "convolve":
            return self.conv_shape().output(given[1:]) == result[1:]
        if self.function in ("affine", "add"):
            return all(tuple(shape) == result for shape in self.shapes)
        if self.window is None:
            return False
        axes = zip(given[1:], self.window.padding, self.window.stride, result[1:], strict=True)
        starts_inside = all(out <= (size - 1 + padding) // stride + 1 for size, padding, stride, out in axes)
        return starts_inside and given.channels == result.channels

    def plain(self) -> dict[str, Any]:
        """Return the fields that are not defaults, as JSON has them."""
        kept = {name: value for name, value in asdict(self).items() if value != getattr(Call, name, None)}
        if self.window is not None:
            window = asdict(self.window).items()
            kept["window"] = {name: value for name, value in window if value != getattr(Window, name, None)}
        return kept


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape) < 1 or Shape(*shape).size > LARGEST_VALUE:
        raise UserError(f"no value has the shape {list(shape)}")


def constant(number: int, part: str) -> str:
    """Return the name of the `scale` or the `shift` of call `number`, an `affine`."""
    return f"{PREFIX}{number}/{part}"


@dataclass(frozen=True)
class Calls:
    """A network as calls in the order of execution.

    Attributes:
        image: Shape of one image.
        calls: The calls.
        result: The call whose result is the output.
    """

    image: tuple[int, ...]
    calls: tuple[Call, ...]
    result: int

    def plain(self) -> dict[str, Any]:
        """Return the calls as JSON has them."""
        return {"image": self.image, "calls": [call.plain() for call in self.calls], "result": self.result}

    def check(self) -> None:
        """Check that the calls fit each other, before anything is computed from them.

        Raises:
            UserError: If a call reads a value that does not exist yet, or that has another shape.
        """
        _check_shape(self.image)
        if not 0 <= self.result < len(self.calls):
            raise UserError(f"there is no call {self.result}, which gives the result")
        shapes = {IMAGE: Shape(*self.image)}
        for number, call in enumerate(self.calls):
            try:
                call.check()
                for source, shape in zip(call.inputs, call.shapes, strict=True):
                    if source not in shapes:
                        raise UserError(f"there is no value {source}")
                    flat = Shape(shapes[source].size)
                    if Shape(*shape) not in (shapes[source], flat):
                        raise UserError(f"it reads {list(shapes[source])} as {list(shape)}")
            except UserError as error:
                raise UserError(f"call {number}: {error}") from None
            shapes[number] = Shape(*call.shape)
