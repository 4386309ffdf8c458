"""Kernel steps for inference: a list with fixed buffers that runs in one call of the library, without torch."""

from __future__ import annotations

import math
from ctypes import Array, byref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.kernels.blocks import find
from equipoise.kernels.geometry import NO_BORDER, Border, ConvShape, Pair, check_pool, source_block
from equipoise.kernels.huge_pages import FLOAT, Floats, Slab
from equipoise.kernels.library import LANES, Map, Step
from equipoise.kernels.planes import COLUMNS, Planes, address, vector

CONV, PLANE, POOL, COPY, BLOCKS = range(5)  # the kinds of program.c
FEW = 8  # fewer images run faster plane by plane than side by side
# Limits of the images that run through the whole network together. Many images share large steps and wake threads
# seldom, but every step has a separate buffer: no more than those of 128 small images.
POSITIONS = 128 * 32 * 32
MOST_BLOCKS = 8
CACHED = 2**14  # floats of the planes of one image that need not be divided into blocks to stay in cache
TAP = np.dtype([("weight", np.float32), ("offset", np.int32)])


class Buffers:
    """The steps of a program with one set of buffers, for one call at a time.

    Args:
        steps: The steps, with indices for addresses.
        sizes: Floats of each buffer.
        x: Planes of the input.
        y: Planes of the output.
        half: Whether the planes are bf16.
    """

    def __init__(self, steps: list[_Added], sizes: list[int], x: Planes, y: Planes, half: bool) -> None:
        slab = Slab()
        self._memory = [slab.take(size) for size in sizes]
        self._steps = self._with_addresses(steps)
        self._added = steps  # owns the weights that the steps point to
        self._maps = {planes: self._addressed(planes.described(), planes) for planes in (x, y)}
        self._x, self._y, self._half = x, y, half
        self._inside = {planes: planes.array(self._memory[planes.buffer])[..., 0] for planes in (x, y)}

    def compute(self, images: Floats, threads: int) -> Floats:
        """Return the outputs (images, channels, height, width) of inputs, as many as the blocks hold at most.

        Raises:
            UserError: If the images are not float32 or do not fit the input.
        """
        x, y, count = self._x, self._y, len(images)
        if images.dtype != np.float32 or images.shape[1:] != x.size or count > x.shape[0] * x.lanes << self._half:
            raise UserError(f"images of {images.dtype} {list(images.shape)} do not fit {list(x.size)}")
        out = np.empty((count, *y.size), np.float32)
        if count:
            self._copy(images, x, threads, to_planes=True)
            library.load().eq_program(self._steps, len(self._steps), threads)
            self._copy(out, y, threads, to_planes=False)
        return out

    def _copy(self, images: Floats, planes: Planes, threads: int, to_planes: bool) -> None:
        if planes.lanes == 1:
            inside = self._inside[planes][: len(images)]
            target, source = (inside, images) if to_planes else (images, inside)
            target[...] = source
            return
        if any(step % FLOAT for step in images.strides):
            images = images.copy()
        plain = Map(images.ctypes.data, *images.shape, *(step // FLOAT for step in images.strides))
        blocked = Map.from_buffer_copy(self._maps[planes])
        blocked.n = -(-len(images) // (LANES << self._half))
        library.load().eq_layout(byref(plain), byref(blocked), to_planes, self._half, threads)

    def _addressed(self, described: Map, planes: Planes) -> Map:
        """Turn the index of a description into an address."""
        described.data = self._memory[planes.buffer].ctypes.data + (described.data or 0)
        return described

    def _with_addresses(self, added: list[_Added]) -> Array[Step]:
        steps = (Step * len(added))(*(Step.from_buffer_copy(one.step) for one in added))
        for step, one in zip(steps, added, strict=True):
            self._addressed(step.x, one.x)
            self._addressed(step.y, one.y)
            if one.residual is not None:
                self._addressed(step.residual, one.residual)
        return steps


@dataclass(frozen=True)
class _Added:
    """A step with the planes that it reads and writes, and the owners of its weights."""

    step: Step
    x: Planes
    y: Planes
    residual: Planes | None
    keep: list[Any]


class KernelSteps:
    """A list of kernel steps, and the buffers that they read and write. Nothing is allocated before `buffers`.

    Args:
        blocks: Blocks of images that run together.
        lanes: Words of an image or two in a block: 16 side by side, or 1, which runs plane by plane.
        half: Whether the words are pairs of bf16 numbers, so that a block has 32 images; with 16 lanes only.
    """

    def __init__(self, blocks: int, lanes: int, half: bool = False) -> None:
        self.blocks, self.lanes, self.half = blocks, lanes, half
        self._steps: list[_Added] = []
        self._sizes: list[int] = []

    @property
    def floats(self) -> int:
        """Floats in all buffers."""
        return sum(self._sizes)

    def buffers(self, x: Planes, y: Planes) -> Buffers:
        """Allocate buffers for the steps that were added.

        Args:
            x: The input.
            y: The output.
        """
        return Buffers(self._steps, self._sizes, x, y, self.half)

    def buffer(self, shape: tuple[int, int, int], border: Border = NO_BORDER, pitch: int = 0) -> Planes:
        """Return planes of this shape inside zeros, whose rows are at least `pitch` columns apart."""
        (channels, height, width), (rows, columns) = shape, border
        pitch = max(pitch, width + 2 * columns)
        plane = (height + 2 * rows) * pitch
        size = (self.blocks * channels * plane + 2 * pitch) * self.lanes + 64
        steps = (self.lanes * channels * plane, self.lanes * plane, self.lanes * pitch, self.lanes)
        return self._planes(size, self.lanes * (rows * pitch + columns), shape, steps, border)

    def _planes(
        self,
        size: int,
        start: int,
        shape: tuple[int, int, int],
        steps: tuple[int, int, int, int],
        border: Border = NO_BORDER,
    ) -> Planes:
        self._sizes.append(size)
        return Planes(len(self._sizes) - 1, size, start, (self.blocks, *shape), steps, self.lanes, border)

    def _add(
        self,
        kind: int,
        x: Planes,
        y: Planes,
        residual: Planes | None = None,
        keep: list[Any] | None = None,
        maps: tuple[Map, Map] | None = None,
        **fields: Any,
    ) -> None:
        """Add a step; `keep` are the owners of the memory that its fields point to."""
        described, written = maps or (x.described(), y.described())
        if residual is not None:
            fields["residual"] = residual.described()
        step = Step(x=described, y=written, kind=kind, lanes=self.lanes, half=self.half, **fields)
        self._steps.append(_Added(step, x, y, residual, keep or []))

    def plane(
        self,
        x: Planes,
        scale: Floats | None = None,
        shift: Floats | None = None,
        residual: Planes | None = None,
        relu: bool = False,
        pool: bool = False,
        border: Border = NO_BORDER,
    ) -> Planes:
        """Add scale, shift, residual addition, ReLU and 2x2 max-pool, and return the result."""
        channels, height, width = x.size
        if pool:
            check_pool(4, (height, width), (2, 2))
            height, width = height // 2, width // 2
        y = self.buffer((channels, height, width), border)
        if residual is not None and residual.shape != x.shape:
            raise UserError(
                f"a residual must have the shape of the input it is added to, {x.size} per image, not {residual.size}"
            )
        keep = [vector(numbers, channels, "norm") for numbers in (scale, shift)]
        if self.lanes == 1:  # vectors run along rows
            x.described(beyond=2 * COLUMNS)
            if residual is not None:
                residual.described(beyond=COLUMNS)
        self._add(PLANE, x, y, residual, keep, relu=relu, pool=pool, scale=address(keep[0]), shift=address(keep[1]))
        return y

    def mean(self, x: Planes, kernel: Pair | None = None) -> Planes:
        """Add the mean over windows of size and stride `kernel`, by default over the whole plane."""
        _, height, width = x.size
        high, wide = kernel or (height, width)
        check_pool(4, (height, width), (max(1, high), max(1, wide)))  # a map may be empty
        return self.pool(x, (height // high, width // wide), (high, wide), (high, wide), mean=True)

    def pool(
        self,
        x: Planes,
        size: Pair,
        kernel: Pair,
        stride: Pair,
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
        mean: bool = False,
        count_padding: bool = False,
        border: Border = NO_BORDER,
    ) -> Planes:
        """Add the largest numbers or the means of windows, and return the result.

        Args:
            x: The input.
            size: Height and width of the result.
            kernel: Rows and columns of a window.
            stride: Rows and columns from one window to the next.
            padding: Rows and columns around the input that windows may reach into.
            dilation: Distance between the rows and columns of a window.
            mean: Whether to take means.
            count_padding: Whether padding counts in means as zeros.
            border: Zeros to put around the result.
        """
        y = self.buffer((x.size[0], *size), border)
        self._add(POOL, x, y, window=(*kernel, *stride, *padding, *dilation), mean=mean, count_padding=count_padding)
        return y

    def flatten(self, x: Planes) -> Planes:
        """Add a copy that turns channels, rows and columns into channels."""
        channels, height, width = x.size
        count = channels * height * width
        y = self.buffer((count, 1, 1))
        steps = (self.lanes * count, self.lanes * height * width, self.lanes * width, self.lanes)
        self._add(COPY, x, y.view(x.shape, steps))
        return y

    def conv(
        self,
        x: Planes,
        shape: ConvShape,
        index: NDArray[Any],
        values: Floats,
        bias: Floats | None = None,
        relu: bool = False,
        border: Border = NO_BORDER,
    ) -> Planes:
        """Add a sparse convolution, and return the result.

        Args:
            x: The input.
            shape: The convolution.
            index: Ascending flat indices of the active weights.
            values: The active weights.
            bias: One value per output channel.
            relu: Whether to apply ReLU.
            border: Zeros to put around the result.
        """
        shape.check_channels(x.size[0])
        size, stride, pitch = shape.output((x.size[1], x.size[2])), shape.stride, 0
        if self.lanes == 1:  # the kernel wants rows of the same length in x and y
            pitch = size[1] + 2 * border[1]
        x = self._bordered(x, shape.padding, pitch if stride == (1, 1) else 0)
        if self.lanes == 1 and stride != (1, 1):
            x, offsets = self._phases(x, shape, size, pitch)
            stride = (1, 1)
        else:
            offsets = _tap_offsets(shape, x.steps[2], x.steps[3])
        y = self.buffer((shape.out_channels, *size), border, x.steps[2] if self.lanes == 1 and size[0] > 1 else 0)
        low, high = int(offsets.min()), int(offsets.max())
        last = max(0, shape.in_channels - 1) * x.steps[1] + high
        if last >= 2**31 or low < -(2**31):
            raise UserError("the activation of one block of images is too large for the kernels (2^31 values)")
        maps = (x.described_source(y, stride, (low, last)), y.described())
        bias = vector(bias, shape.out_channels, "bias")
        index = checked_index(shape, index)
        found = find(shape, index)
        if found is not None:
            kind, kernel = BLOCKS, found.kernel
            arrays = {
                "start": found.start,
                "offset": found.offsets(x.steps[1], offsets),
                "weights": found.weights(values),
            }
        else:
            cached = self.lanes == 1 and x.size[0] * x.steps[1] <= CACHED  # all planes, without division
            taps, start = sorted_taps(shape, index, values, x.steps[1], offsets, one_block=cached)
            kind, kernel = CONV, (len(start) - 1) // max(1, shape.out_channels)
            arrays = {"taps": taps, "start": start}
        fields: dict[str, Any] = {name: address(array) for name, array in arrays.items()}
        self._add(
            kind,
            x,
            y,
            keep=[*arrays.values(), bias],
            maps=maps,
            blocks=kernel,
            reach=high,
            shift=address(bias),
            relu=relu,
            **fields,
        )
        return y

    def _bordered(self, x: Planes, border: Border, pitch: int) -> Planes:
        """Return `x`, or a copy, inside these zeros and with rows that are at least `pitch` columns apart."""
        if x.border[0] >= border[0] and x.border[1] >= border[1] and x.steps[2] >= pitch * x.lanes:
            return x
        y = self.buffer(x.size, border, pitch)
        self._add(COPY, x, y)
        return y

    def _phases(self, x: Planes, shape: ConvShape, size: Pair, pitch: int) -> tuple[Planes, NDArray[np.int64]]:
        """Split the input of a strided convolution by rows and columns modulo the stride: each part has stride 1."""
        (sh, sw), (ph, pw), (dh, dw), (kh, kw) = shape.stride, shape.padding, shape.dilation, shape.kernel
        channels, height, width = x.size
        rows, columns = size[0] + dh * (kh - 1) // sh, size[1] + dw * (kw - 1) // sw
        split = self.buffer((sh * sw * channels, rows, columns), pitch=pitch)
        sn, sc, sr, _ = x.steps
        for phase in range(sh * sw):
            i, j = divmod(phase, sw)
            high, wide = min(rows, -(-(height + 2 * ph - i) // sh)), min(columns, -(-(width + 2 * pw - j) // sw))
            if min(high, wide) < 1:
                continue
            part = (self.blocks, channels, high, wide)
            source = x.view(part, (sn, sc, sh * sr, sw), (i - ph) * sr + j - pw)
            self._add(COPY, source, split.view(part, split.steps, phase * channels * split.steps[1]))
        reach_h, reach_w = np.arange(kh)[:, None] * dh, np.arange(kw) * dw
        phase_step = channels * split.steps[1]
        offsets = (reach_h % sh * sw + reach_w % sw) * phase_step + reach_h // sh * split.steps[2] + reach_w // sw
        return split, offsets.ravel()


def _tap_offsets(shape: ConvShape, row_step: int, column_step: int) -> NDArray[np.int64]:
    rows, columns = (
        np.arange(k) * d - p for k, d, p in zip(shape.kernel, shape.dilation, shape.padding, strict=True)
    )
    return np.asarray(rows[:, None] * row_step + columns * column_step, np.int64).ravel()


def checked_index(shape: ConvShape, index: NDArray[Any]) -> NDArray[np.int32]:
    """Return indices of active weights as int32.

    Raises:
        UserError: If the weight does not have these indices.
    """
    if len(index) and (index[0] < 0 or index[-1] >= shape.weight_numel or (index[1:] <= index[:-1]).any()):
        raise UserError(f"index must be ascending, and below the {shape.weight_numel} elements of the weight")
    return np.ascontiguousarray(index, np.int32)


def sorted_taps(
    shape: ConvShape,
    index: NDArray[Any],
    values: Floats,
    channel_step: int,
    offsets: NDArray[np.int64],
    one_block: bool,
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Sort active weights by block of input channels and output channel, as (weight, offset) pairs.

    Args:
        shape: The convolution.
        index: Ascending flat indices of the active weights, checked.
        values: The active weights.
        channel_step: Floats from one input channel to the next.
        offsets: Offset of each position of the kernel.
        one_block: Whether all input channels form one block.

    Returns:
        The pairs, and for each block and output channel the number of the first pair.
    """
    index, weights = index.astype(np.int64), vector(values, len(index), "values")
    rows, inputs = shape.out_channels, shape.in_channels // shape.groups
    block = max(1, shape.in_channels) if one_block else source_block(shape.in_channels, rows, len(index))
    blocks = -(-shape.in_channels // block)
    channel, which = np.divmod(index, math.prod(shape.kernel))
    out, source = np.divmod(channel, max(1, inputs))
    source += out // max(1, rows // shape.groups) * inputs
    bucket = source // block * rows + out
    order = np.argsort(bucket, kind="stable")
    taps = np.empty(len(index), TAP)
    taps["weight"] = weights[order] if weights is not None else 0
    taps["offset"] = (source * channel_step + offsets[which])[order]
    start = np.zeros(blocks * rows + 1, np.int32)
    np.cumsum(np.bincount(bucket, minlength=blocks * rows), out=start[1:])
    return taps, start


class Batch(NamedTuple):
    """How the images of a batch run through a program."""

    lanes: int
    half: bool
    together: int  # images of one run, at most

    def blocks(self, images: int) -> int:
        """Return the blocks of a program for `images`, a power of two, so that batches of all sizes share few."""
        return 1 << max(-(-images // (self.lanes << self.half)) - 1, 0).bit_length()


def plan(images: int, shape: tuple[int, ...], half: bool, most: int = MOST_BLOCKS) -> Batch:
    """Return how a batch runs.

    Args:
        images: Images in the batch.
        shape: Shape of one image.
        half: Whether activations may be bf16. They are in batches of more than 16 images: fewer would fill half a
            block, and take longer than in float32.
        most: Largest number of blocks of 16 images for which there is memory.
    """
    if images < FEW or most < 1:
        return Batch(1, False, 1)
    return Batch(LANES, half and images > LANES, LANES * min(most_blocks(shape), 1 << (most.bit_length() - 1)))


def most_blocks(shape: tuple[int, ...]) -> int:
    """Return the blocks of 16 images of a shape that run together; a power of two."""
    room = POSITIONS // (LANES * max(1, math.prod(shape[1:])))
    return 1 << (min(max(room, 1), MOST_BLOCKS).bit_length() - 1)
