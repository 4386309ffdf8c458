"""Values of inference programs in memory of numpy, and their addresses for the kernels, without torch.

The kernels trust what they are given. When a step is added, everything that its kernel reads or writes is therefore
checked to lie inside its buffers. Addresses are put in when the buffers are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError
from equipoise.kernels.geometry import NO_BORDER, Border, Pair
from equipoise.kernels.huge_pages import FLOAT, Floats
from equipoise.kernels.library import Map

COLUMNS = 8  # floats in a vector of the kernels that run along planes
Four = tuple[int, int, int, int]


@dataclass(frozen=True)
class Planes:
    """Blocks of images in a buffer that is not allocated yet: (blocks, channels, height, width, lanes).

    Args:
        buffer: Number of the buffer.
        room: Floats in the buffer.
        start: Index of the first float.
        shape: Blocks, channels, height and width.
        steps: Floats from one block, channel, row and column to the next.
        lanes: Images in a block, side by side.
        border: Zeros that surround each plane, rows and columns.
    """

    buffer: int
    room: int
    start: int
    shape: Four
    steps: Four
    lanes: int
    border: Border = NO_BORDER

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.shape[1:]

    def view(self, shape: Four, steps: Four, start: int = 0) -> Planes:
        """Return other planes of the same buffer, which begin `start` floats after these."""
        return replace(self, start=self.start + start, shape=shape, steps=steps, border=NO_BORDER)

    def described(self, beyond: int = 0) -> Map:
        """Return the description for a kernel, with the index of the first float for its address.

        Args:
            beyond: Floats after the last one that the kernel may read.

        Raises:
            UserError: If the planes leave their buffer.
        """
        if all(self.shape):
            self._check(0, _last(self.shape, self.steps) + self.lanes - 1 + beyond)
        return Map(self.start * FLOAT, *self.shape, *self.steps)

    def described_source(self, out: Planes, stride: Pair, reach: Pair) -> Map:
        """Describe the input of a convolution, with steps from one output position to the next.

        Args:
            out: The output.
            stride: Rows and columns of the input from one output position to the next.
            reach: Smallest and largest offset of a tap from the position of an output.

        Raises:
            UserError: If a tap would read outside the buffer.
        """
        described = self.described()
        described.sh *= stride[0]
        described.sw *= stride[1]
        blocks, _, height, width = out.shape
        if self.shape[1] and all(out.shape):  # an empty plane may have a border that is read
            last = _last((blocks, height, width), (described.sn, described.sh, described.sw))
            self._check(reach[0], last + reach[1] + (COLUMNS if self.lanes == 1 else self.lanes) - 1)
            if self.lanes == 1 and height > 1 and described.sh != out.steps[2]:
                raise UserError("planes of a convolution must have rows of the same length")
        return described

    def array(self, memory: Floats) -> Floats:
        """Return the planes as an array (blocks, channels, height, width, lanes) of a buffer."""
        self.described()
        strides = [FLOAT * step for step in (*self.steps, 1)]
        return np.lib.stride_tricks.as_strided(memory[self.start :], (*self.shape, self.lanes), strides)

    def _check(self, first: int, last: int) -> None:
        if self.start + first < 0 or self.start + last >= self.room:
            raise UserError(f"a kernel would leave the memory of an activation of the shape {list(self.shape)}")


def _last(shape: Sequence[int], steps: Sequence[int]) -> int:
    return sum((size - 1) * step for size, step in zip(shape, steps, strict=True))


def vector(numbers: NDArray[np.float32] | None, count: int, name: str) -> Floats | None:
    """Return a contiguous vector of parameters.

    Raises:
        UserError: If it is not float32 or has another number of elements.
    """
    if numbers is None:
        return None
    if numbers.dtype != np.float32 or numbers.shape != (count,):
        raise UserError(
            f"{name} is {numbers.dtype} of the shape {list(numbers.shape)}; it must be float32 of [{count}]"
        )
    return np.ascontiguousarray(numbers)


def address(array: NDArray[np.generic] | None) -> int | None:
    """Return the address of a contiguous array; `None`, a null pointer, for `None`."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise UserError("a kernel reads contiguous arrays only")
    return array.ctypes.data
