"""Reusable activation buffers, each inside a border of zeros.

The C library maps a buffer above 32 MB again on every allocation, which costs more than the kernel that fills it.
Buffers are therefore lent. When the last tensor on a buffer is gone, the memory waits for the next request of the
same shape. Kernels write the interior only, so the border stays zero.

Idle memory is bounded: by 256 MiB (`IDLE_BYTES`), or by twice the most memory that was lent at one time during the last
few thousand loans if that is more, as in training. A step lends its shapes at different times: VGG-C needs 1.3 times
the most that it is lent at once. The buffers that have waited longest are returned to the system, by `clear` all.

A tensor is marked with its border. The mark belongs to the tensor object: autograd hands a gradient from one function
to the next as the same object and may add to it in place. Every view, copy or sum is another object without a mark.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.kernels.boundary import WORD, Checked, lanes
from equipoise.kernels.geometry import NO_BORDER, Border
from equipoise.kernels.huge_pages import FLOAT, zeros
from equipoise.kernels.library import LANES

Shape = tuple[int, int, int, int]
Key = tuple[Shape, Border]
IDLE_BYTES = 256 << 20  # may wait for its next use, whatever was lent
WINDOW = 4096  # loans after which the most that was lent is measured again


class _Memory:
    """A buffer of the arena. Whatever each loan needs to know about it is computed once."""

    def __init__(self, key: Key) -> None:
        self.checked: dict[torch.dtype, Checked] = {}
        self.key = key
        whole = _whole(key)
        tensor = torch.from_numpy(zeros(math.prod(whole))).view(whole)
        self.nbytes, self.steps = _nbytes(key), tensor.stride()
        _, (rows, columns) = key
        self.start = rows * self.steps[2] + columns * self.steps[3]
        self.array = tensor.numpy()  # keeps the memory alive
        self.__array_interface__: dict[str, Any] = self.array.__array_interface__


def _whole(key: Key) -> tuple[int, ...]:
    """Shape of a buffer with its border."""
    (blocks, channels, height, width), (rows, columns) = key
    return blocks, channels, height + 2 * rows, width + 2 * columns, LANES


def _nbytes(key: Key) -> int:
    return math.prod(_whole(key)) * FLOAT


class _Store:
    """Idle memory, and how much is lent. All threads share one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few operations on dictionaries, never while a kernel runs
        self._returned: deque[_Memory] = deque()
        self._waiting: OrderedDict[Key, list[_Memory]] = OrderedDict()  # the shape that was returned last is last
        self.idle = self._lent = self._loans = self._peak = self._last_peak = 0

    def find(self, key: Key) -> _Memory | None:
        """Count a loan, and return idle memory for it if there is some."""
        with self._lock:
            self._sort()
            self._loans += 1
            if self._loans % WINDOW == 0:
                self._last_peak, self._peak = self._peak, 0
            self._lent += _nbytes(key)
            self._peak = max(self._peak, self._lent)
            if not (waiting := self._waiting.get(key)):
                return None
            memory = waiting.pop()
            self.idle -= memory.nbytes
            return memory

    def take_back(self, memory: _Memory) -> None:
        """Keep memory for its next use. Never waits: a garbage collection may call this inside any function."""
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._sort()
            finally:
                self._lock.release()

    def cancel(self, key: Key) -> None:
        """Count a loan no longer, for which there was no memory."""
        with self._lock:
            self._lent -= _nbytes(key)

    def clear(self) -> None:
        """Return idle memory to the system."""
        with self._lock:
            self._sort()
            self._waiting.clear()
            self.idle = 0

    def _sort(self) -> None:
        """Sort returned memory by shape, and drop what has waited longest and is too much."""
        while self._returned:
            memory = self._returned.popleft()
            self._lent -= memory.nbytes
            self.idle += memory.nbytes
            self._waiting.setdefault(memory.key, []).append(memory)
            self._waiting.move_to_end(memory.key)
        most = max(IDLE_BYTES, 2 * self._peak, 2 * self._last_peak)
        while self.idle > most:
            key, waiting = next(iter(self._waiting.items()))
            if waiting:
                self.idle -= waiting.pop(0).nbytes
            if not waiting:
                del self._waiting[key]


_store = _Store()


def _new_store() -> None:
    """In a forked child, the store may have been changing, under a lock that no thread will release."""
    global _store
    _store = _Store()


os.register_at_fork(after_in_child=_new_store)


class _Loan:
    """Owner of lent memory. numpy keeps it alive, and its end returns the memory."""

    memory: _Memory | None = None  # torch.compile makes such objects without calling __init__ and drops them

    def __init__(self, memory: _Memory, store: _Store) -> None:
        self.memory, self._store = memory, store
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        if self.memory is not None:
            self._store.take_back(self.memory)


def clear() -> None:
    """Return idle memory to the system."""
    _store.clear()


def idle_bytes() -> int:
    """Return the size of the memory that waits for its next use."""
    return _store.idle


def take(shape: Shape, border: Border = NO_BORDER, dtype: torch.dtype = torch.float32) -> Tensor:
    """Lend a tensor (blocks, channels, height, width, lanes), not initialised, inside a border of zeros.

    A block has the same size in every type: it has twice as many images in bfloat16.

    Raises:
        MemoryError: If there is no memory.
    """
    store, key = _store, (shape, border)
    if not _nbytes(key):
        return torch.empty(*shape, lanes(dtype), dtype=dtype)
    memory = store.find(key) or _new_memory(store, key)
    lent = torch.from_numpy(np.asarray(_Loan(memory, store)))
    if dtype is torch.float32:
        lent = lent.as_strided((*shape, LANES), memory.steps, memory.start)
    else:
        per_word = WORD // dtype.itemsize
        steps = [per_word * step for step in memory.steps[:4]]
        lent = lent.view(dtype).as_strided((*shape, lanes(dtype)), (*steps, 1), per_word * memory.start)
    if dtype not in memory.checked:
        memory.checked[dtype] = Checked(lent)
    lent.checked = memory.checked[dtype]  # type: ignore[attr-defined]
    return with_mark(lent, border)


def _new_memory(store: _Store, key: Key) -> _Memory:
    try:
        return _Memory(key)
    except MemoryError:
        store.clear()
    try:
        return _Memory(key)
    except MemoryError:
        store.cancel(key)
        raise


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
    if has_border(tensor, border) and tensor.stride(4) == 1 and tensor.stride(3) == tensor.shape[4]:
        return tensor
    blocks, channels, height, width, _ = tensor.shape
    return take((blocks, channels, height, width), border, tensor.dtype).copy_(tensor)
