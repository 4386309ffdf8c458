"""Active weights sorted for the kernels: by output channel and, for the input gradient, by input channel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.kernels.arena import Border
from equipoise.kernels.library import LANES

Pair = tuple[int, int]
# A block of source channels should stay in the first-level cache while all destination channels read it,
# but each destination needs enough taps per block to pay for loading and storing its accumulators.
TAPS_PER_VISIT = 24
CACHED_CHANNELS = 16


@dataclass(frozen=True)
class ConvShape:
    """Geometry of a convolution. A linear layer is a convolution with a 1x1 kernel on 1x1 maps."""

    out_channels: int
    in_channels: int
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def weight_numel(self) -> int:
        """Number of weights, active and inactive."""
        return self.out_channels * (self.in_channels // self.groups) * self.kernel[0] * self.kernel[1]

    def check_channels(self, channels: int) -> None:
        """Refuse an input of other channels: the kernels trust the pattern and would read beyond its end."""
        if channels != self.in_channels:
            raise UserError(f"the layer takes {self.in_channels} channels, the input has {channels}")

    def output(self, size: Pair) -> Pair:
        """Return height and width of the output for an input of `size`."""
        out = tuple(
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, k, t, p, d in zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        if min(out) < 1:
            raise UserError(f"a map of {size[0]}x{size[1]} is too small for a kernel of {self.kernel}")
        return out[0], out[1]

    def grad_border(self, size: Pair) -> Border:
        """Return the zeros that the input gradient reads around an output gradient, for an input of `size`."""
        axes = zip(size, self.output(size), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        wanted = [max(0, (d * (k - 1) - p) // t, (s - 1 + p) // t - (o - 1)) for s, o, k, t, p, d in axes]
        return wanted[0], wanted[1]


class Taps:
    """One direction of a pattern: (weight, offset) pairs by phase, block of source channels and destination.

    Args:
        shape: The convolution.
        index: Ascending flat indices of the active weights, int32.
        transposed: Whether the taps are those of the input gradient.
        one_block: Whether all source channels form one block.
    """

    def __init__(self, shape: ConvShape, index: Tensor, transposed: bool, one_block: bool = False) -> None:
        self.shape, self.transposed, self.count = shape, transposed, index.numel()
        rows, sources = shape.out_channels, shape.in_channels
        if transposed:
            rows, sources = sources, rows
        self.rows, self.phases = rows, math.prod(shape.stride) if transposed else 1
        visits = 1 if one_block else max(1, self.count // max(1, rows * self.phases * TAPS_PER_VISIT))
        block = max(CACHED_CHANNELS, -(-sources // visits))
        self.blocks = -(-sources // block)
        self.start = torch.empty(self.phases * self.blocks * rows + 1, dtype=torch.int32)
        self.order, self._source, self._which = torch.empty(3, max(1, self.count), dtype=torch.int32)
        self.taps = torch.empty(max(1, self.count), 2, dtype=torch.int32)  # float weight, int offset
        self._steps: Pair | None = None
        self.reach = 0
        group = (shape.in_channels // shape.groups, shape.out_channels // shape.groups, math.prod(shape.kernel))
        geometry = torch.tensor([*group, int(transposed), block, self.blocks, rows, self.phases])
        phases = self._tap_phases()  # named, so that it lives until the call returns
        library.load().eq_pattern(
            self.count,
            *map(library.pointer, (index, geometry, phases)),
            *map(library.pointer, (self.start, self.order, self._source, self._which)),
        )

    def _tap_phases(self) -> Tensor:
        """Rows and columns of the input, modulo the stride, that each tap of the kernel leads back to."""
        if not self.transposed:
            return torch.zeros(math.prod(self.shape.kernel), dtype=torch.int32)
        rows, columns = (self._reach(axis) % self.shape.stride[axis] for axis in (0, 1))
        return (rows[:, None] * self.shape.stride[1] + columns).flatten().to(torch.int32)

    def _reach(self, axis: int) -> Tensor:
        """Distance from the position of an output in the input to the input that each tap of the kernel reads."""
        shape = self.shape
        return torch.arange(shape.kernel[axis]) * shape.dilation[axis] - shape.padding[axis]

    def _tap_offsets(self, row_step: int) -> Tensor:
        rows, columns = self._reach(0), self._reach(1)
        if self.transposed:
            high, wide = self.shape.stride
            rows, columns = (rows % high - rows) // high, (columns % wide - columns) // wide
        return (rows[:, None] * row_step + columns * LANES).flatten()

    def load(self, values: Tensor, channel_step: int, row_step: int) -> None:
        """Set weights, and offsets into a blocked source map with these steps."""
        self.set_steps(channel_step, row_step)
        self.set_weights(values)

    def set_steps(self, channel_step: int, row_step: int) -> None:
        """Set offsets only; the gradient of the weights needs no weights."""
        if self._steps != (channel_step, row_step):
            self.set_offsets(channel_step, self._tap_offsets(row_step))
            self._steps = (channel_step, row_step)

    def set_offsets(self, channel_step: int, tap_offsets: Tensor) -> None:
        """Set the offset of each tap: its source channel times `channel_step`, plus its offset in the kernel."""
        sources = self.shape.out_channels if self.transposed else self.shape.in_channels
        self.reach = int(tap_offsets.max())
        if sources * channel_step + self.reach >= 2**31:
            raise UserError("the activation of one block of images is too large for the kernels (2^31 values)")
        library.load().eq_offsets(
            self.count,
            *map(library.pointer, (self._source, self._which)),
            channel_step,
            *map(library.pointer, (tap_offsets, self.taps)),
        )

    def set_weights(self, values: Tensor) -> None:
        """Set the weight of each tap from the vector of active values."""
        library.load().eq_weights(self.count, *map(library.pointer, (self.order, values, self.taps)))

    def start_of_phase(self, phase: int) -> int:
        """Return the address at which the starts of a phase's rows begin."""
        return self.start.data_ptr() + 4 * phase * self.blocks * self.rows


class Pattern:
    """Active weights of one layer, with both directions of taps built when first needed.

    Args:
        shape: The convolution.
        index: Ascending flat indices of the active weights; copied.
    """

    def __init__(self, shape: ConvShape, index: Tensor) -> None:
        self.shape, self.index = shape, index.to(torch.int32, copy=True)

    def fits(self, index: Tensor) -> bool:
        """Return whether this is the pattern of `index`, by value: a snapshot puts other indices into one tensor."""
        return torch.equal(self.index, index)

    @cached_property
    def forward(self) -> Taps:
        """Taps by output channel."""
        return Taps(self.shape, self.index, transposed=False)

    @cached_property
    def transposed(self) -> Taps:
        """Taps by input channel."""
        return Taps(self.shape, self.index, transposed=True)
