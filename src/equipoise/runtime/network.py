"""Networks for inference on the kernels, from the calls and the weights of a packed file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError
from equipoise.kernels.geometry import NO_BORDER, Border
from equipoise.kernels.huge_pages import Floats
from equipoise.kernels.library import LANES
from equipoise.kernels.planes import Planes
from equipoise.kernels.pool import Pool
from equipoise.kernels.steps import Batch, Buffers, KernelSteps, plan
from equipoise.runtime.calls import IMAGE, Call, Calls, Shape, constant
from equipoise.runtime.indices import INDICES, decode_indices
from equipoise.runtime.packed_arrays import Stored

LARGEST = 2**28  # floats in the buffers of a program, 1 GiB


@dataclass(frozen=True)
class Weight:
    """Active weights of a convolution in the order of their indices, and its bias."""

    index: NDArray[np.int64]
    values: Floats
    bias: Floats | None


class Network:
    """A network that maps images to scores. Any number of threads may call it at the same time.

    Args:
        calls: The calls, checked.
        tensors: Tensors of the file, by name.
        input_shape: Shape of one image.
        classes: Names of the classes, by label; empty if unknown.
        threads: Number of threads.
        half: Whether activations of batches of more than 16 images are bf16.

    Raises:
        UserError: If the weights do not fit the calls or are not finite, or the network would take too much memory.
    """

    def __init__(
        self,
        calls: Calls,
        tensors: Mapping[str, Stored],
        input_shape: tuple[int, ...],
        classes: tuple[str, ...],
        threads: int,
        half: bool = False,
    ) -> None:
        self._half = half
        self.input_shape, self.classes, self.threads = input_shape, classes, threads
        self._calls = calls
        self._weights = {n: _weight(c, tensors) for n, c in enumerate(calls.calls) if c.function == "convolve"}
        self._affines = {
            n: [_vector(tensors, constant(n, part), c.shape[0]) for part in ("scale", "shift")]
            for n, c in enumerate(calls.calls)
            if c.function == "affine"
        }
        self._borders = _borders(calls)
        floats, make = self._compiled(1, lanes=1, half=False)
        self._most = LARGEST // (LANES * floats)  # blocks of 16 images for which there is room
        self._programs = {(1, 1, False): Pool(make)}

    def __call__(self, images: NDArray[np.float32]) -> Floats:
        """Return the scores (n, classes) of images.

        Args:
            images: float32 of the shape (n, *input_shape), pixels in [0, 1].

        Raises:
            UserError: If the images have another type or shape.
        """
        images = self._checked(images)
        batch = plan(len(images), Shape(*self._calls.image), self._half, self._most)
        parts = [self._run(images[i : i + batch.together], batch) for i in range(0, len(images), batch.together)]
        return np.concatenate([np.empty((0, Shape(*self._result.shape).size), np.float32), *parts])

    @property
    def _result(self) -> Call:
        return self._calls.calls[self._calls.result]

    def _checked(self, images: Any) -> Floats:
        if not isinstance(images, np.ndarray):
            raise UserError(f"the network takes a numpy array, not {type(images).__name__}")
        if not np.issubdtype(images.dtype, np.floating):
            raise UserError(
                f"the network takes pixels in [0, 1] as float32, not {images.dtype}; give it images / 255"
            )
        if images.dtype != np.float32:
            raise UserError(f"the network takes float32, not {images.dtype}; use .astype(numpy.float32)")
        if images.shape[1:] != self.input_shape or images.ndim != len(self.input_shape) + 1:
            wanted = ", ".join(map(str, self.input_shape))
            raise UserError(f"the network takes images of (n, {wanted}), not {images.shape}")
        return images.reshape(len(images), *Shape(*self._calls.image))

    def _run(self, images: Floats, batch: Batch) -> Floats:
        key = (batch.blocks(len(images)), batch.lanes, batch.half)
        pool = self._programs.get(key)
        if pool is None:
            pool = self._programs.setdefault(key, Pool(self._compiled(*key)[1]))
        with pool.lend() as buffers:
            return buffers.compute(images, self.threads).reshape(len(images), -1)

    def _compiled(self, blocks: int, lanes: int, half: bool) -> tuple[int, Callable[[], Buffers]]:
        """The floats that the buffers of a program take, and a function that allocates them."""
        steps = KernelSteps(blocks, lanes, half)
        values = {IMAGE: steps.buffer(Shape(*self._calls.image), self._borders.get(IMAGE, NO_BORDER))}
        for number, call in enumerate(self._calls.calls):
            values[number] = self._add(steps, number, call, [values[source] for source in call.inputs])
            if steps.floats > LARGEST:
                raise UserError(f"the network takes more than {LARGEST} numbers of memory")
        return steps.floats, partial(steps.buffers, values[IMAGE], values[self._calls.result])

    def _add(self, steps: KernelSteps, number: int, call: Call, inputs: list[Planes]) -> Planes:
        border = self._borders.get(number, NO_BORDER)
        sources = [
            x if x.size == tuple(shape) else steps.flatten(x) for x, shape in zip(inputs, call.shapes, strict=True)
        ]
        if call.function == "convolve":
            weight = self._weights[number]
            shape = call.conv_shape()
            return steps.conv(sources[0], shape, weight.index, weight.values, weight.bias, call.relu, border)
        if call.function == "affine":
            scale, shift = self._affines[number]
            return steps.plane(sources[0], scale, shift, relu=call.relu, border=border)
        if call.function == "add":
            return steps.plane(sources[0], residual=sources[1], relu=call.relu, border=border)
        return _pool(steps, sources[0], call, border)


def _pool(steps: KernelSteps, x: Planes, call: Call, border: Border) -> Planes:
    w = call.window
    assert w is not None  # checked by `Calls.check`
    plain = (w.padding, w.dilation) == ((0, 0), (1, 1)) and not call.mean
    halves = (x.size[1] // 2, x.size[2] // 2) == tuple(call.shape[1:])
    if plain and w.kernel == w.stride == (2, 2) and halves:
        return steps.plane(x, pool=True, border=border)
    size = (call.shape[1], call.shape[2])
    return steps.pool(
        x, size, w.kernel, w.stride, w.padding, w.dilation, call.mean, call.count_padding, border=border
    )


def _borders(calls: Calls) -> dict[int, Border]:
    """The zeros that convolutions read around each value."""
    borders: dict[int, Border] = {}
    shapes = {IMAGE: Shape(*calls.image)} | {n: Shape(*call.shape) for n, call in enumerate(calls.calls)}
    for call in calls.calls:
        source = call.inputs[0]
        if call.function == "convolve" and call.window and tuple(call.shapes[0]) == shapes[source]:
            (rows, columns), (high, wide) = borders.get(source, NO_BORDER), call.window.padding
            borders[source] = (max(rows, high), max(columns, wide))
    return borders


def _weight(call: Call, tensors: Mapping[str, Stored]) -> Weight:
    """Decode the weight of a convolution, see `coding`."""
    shape, name = call.conv_shape(), call.weight
    count, channels = shape.weight_numel, shape.out_channels
    if count >= 2**31:
        raise UserError(f'"{name}" has {count} weights; the kernels have fewer than 2^31')
    stored = _tensor(tensors, f"{name}/values")
    values = stored.floats(name)
    coded = {part: tensors[f"{name}/{part}"].integers() for part in INDICES if f"{name}/{part}" in tensors}
    if values.ndim != 1 or (not coded and len(values) != count):
        raise UserError(f'"{name}": it has values of {list(values.shape)} for {count} weights')
    try:
        weight = (channels, shape.in_channels // shape.groups, *shape.kernel)
        index = decode_indices(coded, weight, len(values)) if coded else np.arange(count)
    except UserError as error:
        raise UserError(f'"{name}": {error}') from None
    if stored.kind == "I8":
        values = values * _vector(tensors, f"{name}/scale", channels)[index // max(1, count // channels)]
    order = np.argsort(index, kind="stable")  # blocks store their values in another order
    order = order[values[order] != 0]
    return Weight(index[order], values[order], _vector(tensors, call.bias, channels) if call.bias else None)


def _tensor(tensors: Mapping[str, Stored], name: str) -> Stored:
    if name not in tensors:
        raise UserError(f'the file has no tensor "{name}"')
    return tensors[name]


def _vector(tensors: Mapping[str, Stored], name: str, count: int) -> Floats:
    numbers = _tensor(tensors, name).floats(name)
    if numbers.shape != (count,):
        raise UserError(f'"{name}" has the shape {list(numbers.shape)}; the network needs [{count}]')
    return numbers
