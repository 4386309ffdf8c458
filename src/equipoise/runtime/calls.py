"""The calls of functions that a network consists of: files store them, C source and the runtime execute them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from equipoise.errors import UserError

Pair = tuple[int, int]
IMAGE = -1  # as an input of a call


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

    def plain(self) -> dict[str, Any]:
        """Return the fields that are not defaults, as JSON has them."""
        kept = {name: value for name, value in asdict(self).items() if value != getattr(Call, name, None)}
        if self.window is not None:
            window = asdict(self.window).items()
            kept["window"] = {name: value for name, value in window if value != getattr(Window, name, None)}
        return kept


def constant(number: int, part: str) -> str:
    """Return the name of the `scale` or the `shift` of call `number`, an `affine`."""
    return f"{PREFIX}{number}/{part}"


PREFIX = "program/"  # of the names of tensors that belong to the program, not to the model


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
