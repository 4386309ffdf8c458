"""Kernel steps for inference: a list with fixed buffers that runs in one call of the library."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import arena, boundary, library, operators
from equipoise.kernels.arena import NO_BORDER, Border
from equipoise.kernels.boundary import COLUMNS
from equipoise.kernels.huge_pages import Slab, zeros
from equipoise.kernels.library import Map, Step
from equipoise.kernels.taps import ConvShape, Pattern

CONV, PLANE, MEAN, COPY = range(4)  # the kinds of program.c


@dataclass(frozen=True)
class Buffers:
    """The steps of a program with one set of buffers, for one call at a time.

    Args:
        steps: The steps.
        chunks: The memory of the buffers.
        x: Buffer of the input.
        y: Buffer of the output.
    """

    steps: Array[Step]
    chunks: list[Tensor]
    x: Tensor
    y: Tensor

    def run(self) -> None:
        """Run all steps, in the order they were added."""
        library.load().eq_program(self.steps, len(self.steps), library.threads())

    def copy(self) -> Buffers:
        """Return the same steps, with the same weights, on other buffers."""
        chunks = [zeros(chunk.numel()) for chunk in self.chunks]
        steps = type(self.steps).from_buffer_copy(self.steps)
        maps = [described for step in steps for described in (step.x, step.y, step.residual) if described.data]
        boundary.move(maps, self.chunks, chunks)
        x, y = (boundary.moved(tensor, self.chunks, chunks) for tensor in (self.x, self.y))
        return Buffers(steps, chunks, x, y)


class KernelSteps:
    """A list of kernel steps, and the buffers that they read and write.

    Args:
        blocks: Blocks of images that run together.
        lanes: Images in a block: 16 side by side, or 1, which runs plane by plane.
    """

    def __init__(self, blocks: int, lanes: int) -> None:
        self.blocks, self.lanes = blocks, lanes
        self._steps: list[Step] = []
        self._keep: list[Any] = []  # weights that the steps point to
        self._slab = Slab()

    def buffers(self, x: Tensor, y: Tensor) -> Buffers:
        """Return the steps that were added, with their buffers.

        Args:
            x: The buffer of the input.
            y: The buffer of the output.
        """
        return Buffers((Step * len(self._steps))(*self._steps), self._slab.chunks, x, y)

    def buffer(self, shape: tuple[int, int, int], border: Border = NO_BORDER) -> Tensor:
        """Return a tensor (blocks, *shape, lanes) inside zeros, with rows long enough for whole vectors."""
        (channels, height, width), (rows, columns) = shape, border
        pitch = width + 2 * columns
        if self.lanes == 1:
            pitch = max(pitch, -(-width // COLUMNS) * COLUMNS + columns)
        plane = (height + 2 * rows) * pitch
        memory = self._slab.take((self.blocks * channels * plane + 2 * pitch) * self.lanes + 64)
        steps = tuple(self.lanes * step for step in (channels * plane, plane, pitch, 1))
        start = memory.storage_offset() + self.lanes * (rows * pitch + columns)
        view = memory.as_strided((self.blocks, *shape, self.lanes), (*steps, 1), start)
        return arena.with_mark(view, border)

    def _vector(self, count: int) -> Tensor:
        """`count` channels side by side: planes of one value need no room for whole vectors."""
        memory = self._slab.take(self.blocks * count + 64)
        return memory.as_strided((self.blocks, count, 1, 1, 1), (count, 1, 1, 1, 1))

    def _add(self, kind: int, x: Map, y: Map, keep: Iterable[Any] = (), **fields: Any) -> None:
        """Add a step; `keep` are the owners of the memory that its fields point to."""
        self._steps.append(Step(x=x, y=y, kind=kind, lanes=self.lanes, **fields))
        self._keep += keep

    def _copy(self, x: Tensor, y: Tensor) -> None:
        """Add a copy between maps with any steps."""
        x_map, y_map = (boundary.describe(tensor, self.lanes, tensor.stride(3)) for tensor in (x, y))
        self._add(COPY, x_map, y_map)

    def plane(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
        pool: bool = False,
        border: Border = NO_BORDER,
    ) -> Tensor:
        """Add scale, shift, residual addition, ReLU and 2x2 max-pool, and return the result's buffer."""
        _, channels, height, width, _ = x.shape
        if pool:
            operators.check_pool(4, (height, width), (2, 2))
            height, width = height // 2, width // 2
        if residual is not None and residual.shape != x.shape:
            ours, theirs = tuple(x.shape[1:4]), tuple(residual.shape[1:4])
            raise UserError(
                f"a residual must have the shape of the input it is added to, {ours} per image, not {theirs}"
            )
        y = self.buffer((channels, height, width), border)
        vectors = [boundary.as_vector(tensor, channels, "norm") for tensor in (scale, shift)]
        fields: dict[str, Any] = {} if residual is None else {"residual": boundary.describe(residual, self.lanes)}
        for name, vector in zip(("scale", "shift"), vectors, strict=True):
            fields[name] = boundary.address(vector, channels, "norm")
        self._add(PLANE, *self._described(x, y), keep=vectors, relu=relu, pool=pool, **fields)
        return y

    def _described(self, x: Tensor, y: Tensor) -> tuple[Map, Map]:
        return boundary.describe(x, self.lanes), boundary.describe(y, self.lanes)

    def mean(self, x: Tensor, kernel: tuple[int, int] | None = None) -> Tensor:
        """Add the mean over windows of size and stride `kernel`, by default over the whole plane."""
        _, channels, height, width, _ = x.shape
        high, wide = kernel or (height, width)
        operators.check_pool(4, (height, width), (max(1, high), max(1, wide)))  # a map may be empty
        rows, columns = height // high, width // wide
        y = self.buffer((channels, rows, columns))
        self._add(MEAN, *self._described(x[:, :, : rows * high, : columns * wide], y))
        return y

    def flatten(self, x: Tensor) -> Tensor:
        """Add a copy that turns channels, rows and columns into channels."""
        _, channels, height, width, lanes = x.shape
        count = channels * height * width
        y = self.buffer((count, 1, 1)) if lanes > 1 else self._vector(count)
        steps = tuple(lanes * step for step in (count, height * width, width, 1))
        self._copy(x, y.as_strided(x.shape, (*steps, 1), y.storage_offset()))
        return y

    def conv(
        self,
        x: Tensor,
        pattern: Pattern,
        values: Tensor,
        bias: Tensor | None = None,
        relu: bool = False,
        border: Border = NO_BORDER,
    ) -> Tensor:
        """Add a sparse convolution, and return the result's buffer.

        Args:
            x: The input.
            pattern: The convolution and the indices of its active weights.
            values: The active weights.
            bias: One value per output channel.
            relu: Whether to apply ReLU.
            border: Zeros to put around the result.
        """
        shape = pattern.shape
        shape.check_channels(x.shape[1])
        x = self._bordered(x, shape.padding)
        size = shape.output((x.shape[2], x.shape[3]))
        y = self.buffer((shape.out_channels, *size), border)
        taps, stride = pattern.taps(one_block=self.lanes == 1), shape.stride
        if self.lanes == 1 and stride != (1, 1):
            x, offsets = self._phases(x, shape, size)
            stride = (1, 1)
        else:
            offsets = _tap_offsets(shape, x.stride(2), x.stride(3))
        taps.set_offsets(x.stride(1), offsets)
        taps.set_weights(values)
        bias = boundary.as_vector(bias, shape.out_channels, "bias")
        self._add(
            CONV,
            boundary.describe_source(x, y.shape, stride, taps.reach[0], self.lanes),
            boundary.describe(y, self.lanes, whole_vectors=self.lanes == 1),
            keep=(taps, bias),
            taps=taps.address,
            start=taps.sorted.start_at(),
            blocks=taps.sorted.blocks,
            reach=taps.reach_in_plane,
            shift=boundary.address(bias, shape.out_channels, "bias"),
            relu=relu,
        )
        return y

    def _bordered(self, x: Tensor, border: Border) -> Tensor:
        if arena.has_border(x, border):
            return x
        y = self.buffer((x.shape[1], x.shape[2], x.shape[3]), border)
        self._copy(x, y)
        return y

    def _phases(self, x: Tensor, shape: ConvShape, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Split the input of a strided convolution by rows and columns modulo the stride: each part has stride 1."""
        (sh, sw), (ph, pw), (dh, dw), (kh, kw) = shape.stride, shape.padding, shape.dilation, shape.kernel
        rows, columns = size[0] + dh * (kh - 1) // sh, size[1] + dw * (kw - 1) // sw
        split = self.buffer((sh * sw * x.shape[1], rows, columns))
        padded = (x.shape[2] + 2 * ph, x.shape[3] + 2 * pw)
        origin = x.storage_offset() - ph * x.stride(2) - pw
        for phase in range(sh * sw):
            i, j = divmod(phase, sw)
            count = (min(rows, -(-(padded[0] - i) // sh)), min(columns, -(-(padded[1] - j) // sw)))
            if min(count) < 1:
                continue
            steps = (x.stride(0), x.stride(1), sh * x.stride(2), sw, 1)
            source = x.as_strided((self.blocks, x.shape[1], *count, 1), steps, origin + i * x.stride(2) + j)
            target = split[:, phase * x.shape[1] : (phase + 1) * x.shape[1], : count[0], : count[1]]
            self._copy(source, target)
        reach_h, reach_w = torch.arange(kh)[:, None] * dh, torch.arange(kw) * dw
        phase_step = x.shape[1] * split.stride(1)
        offsets = (reach_h % sh * sw + reach_w % sw) * phase_step + reach_h // sh * split.stride(2) + reach_w // sw
        return split, offsets.flatten()


def _tap_offsets(shape: ConvShape, row_step: int, column_step: int) -> Tensor:
    rows, columns = (
        torch.arange(k) * d - p for k, d, p in zip(shape.kernel, shape.dilation, shape.padding, strict=True)
    )
    return (rows[:, None] * row_step + columns * column_step).flatten()
