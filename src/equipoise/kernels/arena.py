"""Reusable activation buffers, each inside a border of zeros.

The C library maps a buffer above 32 MB again on every allocation, which costs more than the kernel that fills it.
Buffers are therefore lent. When the last tensor on a buffer is gone, the memory waits for the next request of the
same shape. Kernels write the interior only, so the border stays zero.

A tensor is marked with its border. The mark belongs to the tensor object: autograd hands a gradient from one function
to the next as the same object and may add to it in place. Every view, copy or sum is another object without a mark.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.kernels.huge_pages import zeros
from equipoise.kernels.library import LANES

Border = tuple[int, int]
Shape = tuple[int, int, int, int]
NO_BORDER: Border = (0, 0)
IDLE_BYTES = 4 << 30  # memory that may wait for its next use; a step of ResNet-18 on 128 images takes half of it

_idle: defaultdict[tuple[Shape, Border], list[_Memory]] = defaultdict(list)
_idle_bytes = 0


class _Memory:
    """A buffer of the arena. Whatever each loan needs to know about it is computed once."""

    def __init__(self, shape: Shape, border: Border) -> None:
        self.key = shape, border
        blocks, channels, height, width = shape
        whole = (blocks, channels, height + 2 * border[0], width + 2 * border[1], LANES)
        tensor = zeros(math.prod(whole)).view(whole)
        self.nbytes, self.steps = tensor.nbytes, tensor.stride()
        self.start = border[0] * self.steps[2] + border[1] * self.steps[3]
        self.array = tensor.numpy()  # keeps the memory alive
        self.__array_interface__: dict[str, Any] = self.array.__array_interface__


class _Loan:
    """Owner of lent memory. numpy keeps it alive, and its end returns the memory."""

    memory: _Memory | None = None  # torch.compile makes such objects without calling __init__ and drops them

    def __init__(self, memory: _Memory) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        global _idle_bytes
        if self.memory is None:
            return
        _idle_bytes += self.memory.nbytes
        _idle[self.memory.key].append(self.memory)
        if _idle_bytes > IDLE_BYTES:
            clear()


def clear() -> None:
    """Return idle memory to the system."""
    global _idle_bytes
    _idle.clear()
    _idle_bytes = 0


def take(shape: Shape, border: Border = NO_BORDER) -> Tensor:
    """Lend a tensor (blocks, channels, height, width, lanes), not initialised, inside a border of zeros."""
    global _idle_bytes
    if waiting := _idle.get((shape, border)):
        memory = waiting.pop()
        _idle_bytes -= memory.nbytes
    else:
        memory = _Memory(shape, border)
    if not memory.nbytes:
        return torch.empty(*shape, LANES)
    lent = torch.from_numpy(np.asarray(_Loan(memory)))
    return with_mark(lent.as_strided((*shape, LANES), memory.steps, memory.start), border)


def with_mark(tensor: Tensor, border: Border) -> Tensor:
    """Mark `tensor` as lying inside a border of zeros, and return it."""
    tensor.border = border  # type: ignore[attr-defined]
    return tensor


def has_border(tensor: Tensor, border: Border) -> bool:
    """Whether at least `border` zeros are known to surround each plane of `tensor`."""
    rows, columns = getattr(tensor, "border", NO_BORDER)
    return rows >= border[0] and columns >= border[1]


def with_border(tensor: Tensor, border: Border) -> Tensor:
    """Return `tensor` if the kernels can read it with that much border, else a copy that they can read.

    Of its steps, the kernels require contiguous lanes and then contiguous columns.
    """
    if has_border(tensor, border) and tensor.stride(4) == 1 and tensor.stride(3) == LANES:
        return tensor
    blocks, channels, height, width, _ = tensor.shape
    return take((blocks, channels, height, width), border).copy_(tensor)
