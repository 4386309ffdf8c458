"""Active weights sorted for the kernels: by output channel and, for the input gradient, by input channel."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from equipoise.errors import UserError
from equipoise.kernels import blocks, library
from equipoise.kernels.boundary import address, as_vector
from equipoise.kernels.geometry import ConvShape, Pair, source_block
from equipoise.kernels.library import LANES
from equipoise.kernels.pool import Pool


def check_index(index: Tensor, size: int) -> None:
    """Refuse indices of active weights that a weight of `size` elements does not have, or not in this order.

    Raises:
        UserError: Unless `index` is a vector of ascending integers in [0, size).
    """
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise UserError(f"index must be a vector of int32 or int64, not {index.dtype} of shape {list(index.shape)}")
    if not index.numel():
        return
    if not bool((index[1:] > index[:-1]).all()):
        raise UserError("index must be ascending, without duplicates")
    if index[0] < 0 or index[-1] >= size:
        found = int(index[0]) if index[0] < 0 else int(index[-1])
        raise UserError(f"index has {found}; the weight has {size} elements")


class SortedTaps:
    """One direction of a pattern: its active weights by phase, block of source channels and destination.

    The addresses of its tensors, which never change, are taken once.

    Args:
        shape: The convolution.
        index: Ascending flat indices of the active weights, int32, checked by a `Pattern`.
        transposed: Whether the taps are those of the input gradient.
    """

    def __init__(self, shape: ConvShape, index: Tensor, transposed: bool) -> None:
        self.shape, self.transposed, self.count = shape, transposed, index.numel()
        rows, self.sources = shape.out_channels, shape.in_channels
        if transposed:
            rows, self.sources = self.sources, rows
        self.rows, self.phases = rows, math.prod(shape.stride) if transposed else 1
        block = source_block(self.sources, rows * self.phases, self.count)
        self.blocks = -(-self.sources // block)
        self.start = torch.empty(self.phases * self.blocks * rows + 1, dtype=torch.int32)
        self.order, self.source, self.which = torch.empty(3, self.count, dtype=torch.int32)
        group = (shape.in_channels // shape.groups, shape.out_channels // shape.groups, math.prod(shape.kernel))
        geometry = torch.tensor([*group, int(transposed), block, self.blocks, rows, self.phases])
        self.phase_of = self._tap_phases()
        self._start = address(self.start, self.phases * self.blocks * rows + 1, "start", torch.int32)
        self.order_at, self.source_at, self.which_at = (
            address(tensor, self.count, "order", torch.int32) for tensor in (self.order, self.source, self.which)
        )
        library.load().eq_pattern(
            self.count,
            address(index, self.count, "index", torch.int32),
            address(geometry, 8, "geometry", torch.int64),
            address(self.phase_of, math.prod(shape.kernel), "phases", torch.int32),
            self._start,
            self.order_at,
            self.source_at,
            self.which_at,
        )

    def start_at(self, phase: int = 0) -> int:
        """Address at which the starts of a phase's rows begin."""
        return cast(int, self._start) + self.start.itemsize * phase * self.blocks * self.rows

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

    def offsets(self, row_step: int) -> Tensor:
        """Offset of each tap of the kernel in a plane whose rows are `row_step` words apart."""
        rows, columns = self._reach(0), self._reach(1)
        if self.transposed:
            high, wide = self.shape.stride
            rows, columns = (rows % high - rows) // high, (columns % wide - columns) // wide
        return (rows[:, None] * row_step + columns * LANES).flatten()


class Taps:
    """(weight, offset) pairs in sorted order, for one call at a time.

    Args:
        taps: The order of the taps.
    """

    def __init__(self, taps: SortedTaps) -> None:
        self.sorted = taps
        self.pairs = torch.empty(taps.count, 2, dtype=torch.int32)  # float weight, int offset
        self.address = address(self.pairs, 2 * taps.count, "taps", torch.int32)
        self.reach: list[Pair] = []  # smallest and largest offset of each phase
        self.reach_in_plane = 0  # largest offset of a tap from its source channel
        self._steps: Pair | None = None

    def load(self, values: Tensor, channel_step: int, row_step: int) -> None:
        """Set weights, and offsets into a blocked source map with these steps."""
        self.set_steps(channel_step, row_step)
        self.set_weights(values)

    def set_steps(self, channel_step: int, row_step: int) -> None:
        """Set offsets only; the gradient of the weights needs no weights."""
        if self._steps != (channel_step, row_step):
            self._steps = None  # an error leaves the offsets of no map
            self.set_offsets(channel_step, self.sorted.offsets(row_step))
            self._steps = (channel_step, row_step)

    def set_offsets(self, channel_step: int, tap_offsets: Tensor) -> None:
        """Set the offset of each tap: its source channel times `channel_step`, plus its offset in the kernel."""
        low, high = (self._by_phase(tap_offsets, how) for how in ("amin", "amax"))
        last_channel = max(0, self.sorted.sources - 1) * channel_step
        self.reach = [(first, last_channel + last) for first, last in zip(low, high, strict=True)]
        self.reach_in_plane = max(high)
        if last_channel + max(high) >= 2**31 or min(low) < -(2**31):
            raise UserError("the activation of one block of images is too large for the kernels (2^31 values)")
        library.load().eq_offsets(
            self.sorted.count,
            self.sorted.source_at,
            self.sorted.which_at,
            channel_step,
            address(tap_offsets, math.prod(self.sorted.shape.kernel), "offsets", torch.int64),
            self.address,
        )

    def _by_phase(self, tap_offsets: Tensor, how: str) -> list[int]:
        """Smallest or largest offset of each phase; 0 for a phase without taps."""
        if self.sorted.phases == 1:
            return [int(getattr(tap_offsets, how)())]
        found = tap_offsets.new_zeros(self.sorted.phases)
        return found.scatter_reduce(0, self.sorted.phase_of.long(), tap_offsets, how, include_self=False).tolist()

    def set_weights(self, values: Tensor) -> None:
        """Set the weight of each tap from the vector of active values."""
        weights = as_vector(values, self.sorted.count, "values")  # named, so that it lives until the call returns
        library.load().eq_weights(
            self.sorted.count, self.sorted.order_at, address(weights, self.sorted.count, "values"), self.address
        )


class Pattern:
    """Active weights of one layer, with both directions of taps built when first needed.

    Args:
        shape: The convolution.
        index: Ascending flat indices of the active weights; copied.

    Attributes:
        blocks: The active weights as blocks of 16 outputs x 1 input; `None` if they do not form such blocks.

    Raises:
        UserError: If the weight does not have these indices.
    """

    def __init__(self, shape: ConvShape, index: Tensor) -> None:
        index = index.to("cpu", copy=True)
        check_index(index, shape.weight_numel)  # of the copy: another thread may change the original
        self.shape, self.index = shape, index.to(torch.int32)
        self._pools: dict[bool, Pool[Taps]] = {}
        self.blocks = blocks.find(shape, self.index.numpy())

    def fits(self, index: Tensor) -> bool:
        """Return whether this is the pattern of `index`, by value: a snapshot puts other indices into one tensor."""
        return index.dtype is torch.int32 and torch.equal(self.index, index)

    def lend(self, transposed: bool = False) -> AbstractContextManager[Taps]:
        """Lend taps by output channel, or by input channel if `transposed`, for one call of a kernel."""
        pool = self._pools.get(transposed)
        if pool is None:
            pool = Pool(partial(Taps, SortedTaps(self.shape, self.index, transposed)))
            pool = self._pools.setdefault(transposed, pool)
        return pool.lend()


_patterns = WeakIdKeyDictionary()  # of each tensor of indices, as long as it lives


def pattern_of(shape: ConvShape, index: Tensor) -> Pattern:
    """Return the pattern of `index`. Two are cached for a tensor: a correction alternates between two topologies."""
    known: list[Pattern] = _patterns.get(index, [])
    for pattern in known:
        if pattern.shape == shape and pattern.fits(index):
            return pattern
    _patterns[index] = [Pattern(shape, index), *known[:1]]
    return cast(Pattern, _patterns[index][0])
