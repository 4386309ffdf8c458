"""Kernel steps for inference: a list with fixed buffers that runs in one call of the library."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import arena, library, operators
from equipoise.kernels.arena import NO_BORDER, Border
from equipoise.kernels.huge_pages import Slab
from equipoise.kernels.library import Step
from equipoise.kernels.taps import ConvShape, Taps

CONV, PLANE, MEAN, COPY = range(4)  # the kinds of program.c
COLUMNS = 8  # in a vector of the kernel that runs along planes


class KernelSteps:
    """A list of kernel steps, and the buffers that they read and write.

    Args:
        blocks: Blocks of images that run together.
        lanes: Images in a block: 16 side by side, or 1, which runs plane by plane.
    """

    def __init__(self, blocks: int, lanes: int) -> None:
        self.blocks, self.lanes = blocks, lanes
        self._steps: list[Step] = []
        self._keep: list[Any] = []  # everything that the steps point to
        self._slab = Slab()

    def run(self) -> None:
        """Run all steps, in the order they were added."""
        library.load().eq_program(self._array, len(self._steps), library.threads())

    @cached_property
    def _array(self) -> Any:
        return (Step * len(self._steps))(*self._steps)

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

    def _add(self, kind: int, x: Tensor, y: Tensor, **fields: Any) -> None:
        step = Step(x=library.describe(x), y=library.describe(y), kind=kind, lanes=self.lanes)
        for name, value in fields.items():
            if isinstance(value, Tensor):
                setattr(step, name, library.describe(value) if name == "residual" else value.data_ptr())
            elif value is not None:
                setattr(step, name, value)
        self._keep += [x, y, *fields.values()]
        self._steps.append(step)

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
        self._add(PLANE, x, y, scale=scale, shift=shift, residual=residual, relu=relu, pool=pool)
        return y

    def mean(self, x: Tensor, kernel: tuple[int, int] | None = None) -> Tensor:
        """Add the mean over windows of size and stride `kernel`, by default over the whole plane."""
        _, channels, height, width, _ = x.shape
        high, wide = kernel or (height, width)
        operators.check_pool(4, (height, width), (max(1, high), max(1, wide)))  # a map may be empty
        rows, columns = height // high, width // wide
        y = self.buffer((channels, rows, columns))
        self._add(MEAN, x[:, :, : rows * high, : columns * wide], y)
        return y

    def flatten(self, x: Tensor) -> Tensor:
        """Add a copy that turns channels, rows and columns into channels."""
        _, channels, height, width, lanes = x.shape
        count = channels * height * width
        y = self.buffer((count, 1, 1)) if lanes > 1 else self._vector(count)
        steps = tuple(lanes * step for step in (count, height * width, width, 1))
        self._add(COPY, x, y.as_strided(x.shape, (*steps, 1), y.storage_offset()))
        return y

    def conv(
        self,
        x: Tensor,
        shape: ConvShape,
        index: Tensor,
        values: Tensor,
        bias: Tensor | None = None,
        relu: bool = False,
        border: Border = NO_BORDER,
    ) -> Tensor:
        """Add a sparse convolution, and return the result's buffer.

        Args:
            x: The input.
            shape: The convolution.
            index: Ascending flat indices of the active weights.
            values: The active weights.
            bias: One value per output channel.
            relu: Whether to apply ReLU.
            border: Zeros to put around the result.
        """
        shape.check_channels(x.shape[1])
        x = self._bordered(x, shape.padding)
        size = shape.output((x.shape[2], x.shape[3]))
        y = self.buffer((shape.out_channels, *size), border)
        taps = Taps(shape, index, transposed=False, one_block=self.lanes == 1)
        if self.lanes == 1 and shape.stride != (1, 1):
            x, offsets = self._phases(x, shape, size)
        else:
            offsets = _tap_offsets(shape, x.stride(2), x.stride(3))
        taps.set_offsets(x.stride(1), offsets)
        taps.set_weights(values.contiguous())
        if self.lanes > 1:
            x = x[:, :, :: shape.stride[0], :: shape.stride[1]]  # steps from one output position to the next
        self._add(CONV, x, y, taps=taps.taps, start=taps.start, blocks=taps.blocks, reach=taps.reach,
                  shift=bias, relu=relu)  # fmt: skip
        return y

    def _bordered(self, x: Tensor, border: Border) -> Tensor:
        if arena.has_border(x, border):
            return x
        y = self.buffer((x.shape[1], x.shape[2], x.shape[3]), border)
        self._add(COPY, x, y)
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
            self._add(COPY, source, target)
        reach_h, reach_w = torch.arange(kh)[:, None] * dh, torch.arange(kw) * dw
        phase_step = x.shape[1] * split.stride(1)
        offsets = (reach_h % sh * sw + reach_w % sw) * phase_step + reach_h // sh * split.stride(2) + reach_w // sw
        return split, offsets.flatten()


def _tap_offsets(shape: ConvShape, row_step: int, column_step: int) -> Tensor:
    rows, columns = (
        torch.arange(k) * d - p for k, d, p in zip(shape.kernel, shape.dilation, shape.padding, strict=True)
    )
    return (rows[:, None] * row_step + columns * column_step).flatten()
