"""Activation buffers with a border of zeros, used again from step to step.

A buffer above 32 MB is mapped anew by the C library on every allocation, which costs more than the kernel
that fills it. Buffers are therefore lent: when the last tensor on a loan is gone, the memory waits for the
next loan of the same shape. Kernels write the interior only, so the border stays zero for ever.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.kernels.huge_pages import zeros
from equipoise.kernels.library import LANES

Border = tuple[int, int]
NO_BORDER: Border = (0, 0)
IDLE_BYTES = 4 << 30  # memory that may wait for its next use; a step of ResNet-18 on 128 images takes half of it


class _Key(NamedTuple):
    blocks: int
    channels: int
    height: int
    width: int
    border: Border


_idle: defaultdict[_Key, list[_Memory]] = defaultdict(list)
_idle_bytes = 0
_lent: dict[int, _Key] = {}


class _Memory:
    """A block of the arena: what numpy asks about it is asked at every loan, and answered once."""

    def __init__(self, key: _Key) -> None:
        rows, columns = key.border
        shape = (key.blocks, key.channels, key.height + 2 * rows, key.width + 2 * columns, LANES)
        self.tensor = zeros(math.prod(shape)).view(shape)
        self.nbytes, self.address, self.steps = self.tensor.nbytes, self.tensor.data_ptr(), self.tensor.stride()
        self.start = rows * self.steps[2] + columns * self.steps[3]
        self.__array_interface__: dict[str, Any] = self.tensor.numpy().__array_interface__


class _Loan:
    """Owner of lent memory; numpy keeps it alive, and its end gives the memory back."""

    memory: _Memory | None = None  # torch.compile makes such objects without calling __init__, and drops them

    def __init__(self, key: _Key, memory: _Memory) -> None:
        self.key, self.memory = key, memory
        self.__array_interface__ = memory.__array_interface__
        _lent[memory.address] = key

    def __del__(self) -> None:
        global _idle_bytes
        memory = self.memory
        if memory is None or _lent.pop(memory.address, None) is None:
            return
        _idle_bytes += memory.nbytes
        _idle[self.key].append(memory)
        if _idle_bytes > IDLE_BYTES:
            clear()


def clear() -> None:
    """Hand idle memory back to the system."""
    global _idle_bytes
    _idle.clear()
    _idle_bytes = 0


def take(shape: tuple[int, int, int, int], border: Border = NO_BORDER) -> Tensor:
    """(blocks, channels, height, width, lanes), not initialised, inside a border of zeros."""
    global _idle_bytes
    key = _Key(*shape, border)
    waiting = _idle.get(key)
    if waiting:
        memory = waiting.pop()
        _idle_bytes -= memory.nbytes
    else:
        memory = _Memory(key)
    if not memory.nbytes:
        return torch.empty(*shape, LANES)
    lent = torch.from_numpy(np.asarray(_Loan(key, memory)))
    return lent.as_strided((*shape, LANES), memory.steps, memory.start)


def border_of(tensor: Tensor) -> Border:
    """How many zeros surround each plane of `tensor`; (0, 0) for memory that is not from here."""
    key = _lent.get(tensor.untyped_storage().data_ptr())
    return key.border if key is not None and key[:4] == tensor.shape[:4] else NO_BORDER


def with_border(tensor: Tensor, border: Border) -> Tensor:
    """`tensor` itself where the kernels can read it with that much border, else a copy that they can."""
    rows, columns = border_of(tensor)
    if rows >= border[0] and columns >= border[1] and readable(tensor):
        return tensor
    blocks, channels, height, width, _ = tensor.shape
    return take((blocks, channels, height, width), border).copy_(tensor)


def readable(tensor: Tensor) -> bool:
    """Whether lanes, then columns, are contiguous: all that the kernels ask of steps."""
    return tensor.stride(4) == 1 and tensor.stride(3) == LANES
