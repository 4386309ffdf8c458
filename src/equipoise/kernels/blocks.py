"""Active weights that form blocks of 16 outputs x 1 input, found and sorted for their kernels, without torch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.kernels.geometry import ConvShape, Pair
from equipoise.kernels.huge_pages import Floats
from equipoise.kernels.library import LANES
from equipoise.kernels.planes import address, vector

OUTPUTS = 16  # of a block; GROUP in blocks.c
Integers = NDArray[np.int32]


class Blocks:
    """Taps of a convolution by group of 16 outputs, position in the kernel and input channel.

    Args:
        shape: The convolution.
        taps: Start of each group and position, and input channel, position and order among those of one output.
    """

    def __init__(self, shape: ConvShape, taps: tuple[Integers, Integers, Integers, Integers]) -> None:
        self.shape = shape
        self.start, self.source, self._which, self._order = taps
        self.count, self.kernel = len(self.source), math.prod(shape.kernel)
        rows, columns = (
            np.arange(k) * d - p for k, d, p in zip(shape.kernel, shape.dilation, shape.padding, strict=True)
        )
        self.stride = np.array(shape.stride)
        self.reach = np.stack(np.broadcast_arrays(rows[:, None], columns), -1).reshape(-1, 2)
        self._laid_out: tuple[Pair, tuple[Integers, Pair, int]] | None = None

    def laid_out(self, channel_step: int, row_step: int) -> tuple[Integers, Pair, int]:
        """Return the offset of each tap, their extent, and the largest one within a plane; the last are remembered."""
        steps, last = (channel_step, row_step), self._laid_out  # which other threads may replace
        if last is not None and last[0] == steps:
            return last[1]
        within = self.tap_offsets(row_step)
        found = self.offsets(channel_step, within), self.extent(channel_step, within), int(within.max())
        self._laid_out = steps, found
        return found

    def tap_offsets(self, row_step: int) -> NDArray[np.int64]:
        """Return the offset of each position in the kernel, in a blocked plane with `row_step` floats to a row."""
        return self.reach @ np.array([row_step, LANES])

    def extent(self, channel_step: int, tap_offsets: NDArray[np.int64]) -> Pair:
        """Return the smallest and the largest offset that a tap can have.

        Raises:
            UserError: If the map is too large.
        """
        low, high = int(tap_offsets.min()), int(tap_offsets.max()) + (self.shape.in_channels - 1) * channel_step
        if high >= 2**31 or low < -(2**31):
            raise UserError("the activation of one block of images is too large for the kernels (2^31 values)")
        return low, high

    def offsets(self, channel_step: int, tap_offsets: NDArray[np.int64]) -> Integers:
        """Return the offset of each tap: its source channel times `channel_step`, plus its offset in the kernel."""
        self.extent(channel_step, tap_offsets)
        return (self.source * np.int64(channel_step) + tap_offsets[self._which]).astype(np.int32)

    def weights(self, values: Floats) -> Floats:
        """Return the values in the order of the taps, 16 for each."""
        values = self._checked(values)
        weights = np.empty(self.count * OUTPUTS, np.float32)
        self._copy(values, weights, to_values=False)
        return weights

    def values(self, weights: Floats) -> Floats:
        """Return numbers in the order of the taps in the order of the values."""
        values = np.empty(self.count * OUTPUTS, np.float32)
        self._copy(values, self._checked(weights), to_values=True)
        return values

    def _checked(self, numbers: Floats) -> Floats:
        found = vector(numbers, self.count * OUTPUTS, "values")
        assert found is not None
        return found

    def _copy(self, values: Floats, weights: Floats, to_values: bool) -> None:
        groups = self.shape.out_channels // OUTPUTS
        numbers = (address(self.start), address(self._order), address(values), address(weights))
        library.load().eq_block_weights(groups, self.kernel, *numbers, to_values)


def find(shape: ConvShape, index: NDArray[np.int32]) -> Blocks | None:
    """Return the blocks of active weights; `None` unless all active weights form blocks of 16 outputs x 1 input.

    Args:
        shape: The convolution.
        index: Ascending flat indices of the active weights, checked.
    """
    if not len(index) or shape.out_channels // shape.groups % OUTPUTS:
        return None
    kernel, groups = math.prod(shape.kernel), shape.out_channels // OUTPUTS
    inputs, outputs = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    start = np.empty(groups * kernel + 1, np.int32)
    taps = tuple(np.empty(len(index) // OUTPUTS, np.int32) for _ in range(3))
    found = library.load().eq_find_blocks(
        len(index),
        address(index),
        address(np.array([inputs, outputs, kernel, groups])),
        address(start),
        *map(address, taps),
    )
    return Blocks(shape, (start, *taps)) if found else None  # type: ignore[arg-type]
