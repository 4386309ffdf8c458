"""Kernels without memory raise MemoryError, and work again once there is memory."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from equipoise.kernels import arena, build, library, operators
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.linear import linear
from equipoise.kernels.taps import Pattern

ALLOCATOR = """
#include <stdlib.h>
__attribute__((weak)) int fail_after = -1; /* allocations that succeed before the next one fails; -1: all succeed */
static inline void *limited_alloc(size_t alignment, size_t size) {
    if (fail_after >= 0 && fail_after-- == 0) return NULL;
    return aligned_alloc(alignment, size);
}
#define aligned_alloc limited_alloc
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_every_allocation_of_the_kernels_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "allocator.h").write_text(ALLOCATOR)
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    monkeypatch.setenv("EQUIPOISE_CFLAGS", f"-O0 -DEQ_NO_CLONES -include {tmp_path}/allocator.h")
    ctypes.CDLL(build.openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    limited = library.open_library(build.compiled())
    fail_after = ctypes.c_int.in_dll(limited, "fail_after")
    monkeypatch.setattr(library, "_find", lambda: limited)
    shape, index = ConvShape(4, 3, (3, 3), padding=(1, 1)), torch.arange(0, 108, 5)
    x = torch.randn(20, 3, 5, 5)

    def gradient() -> torch.Tensor:
        values = torch.ones(22, requires_grad=True)
        from_blocked(operators.conv(to_blocked(x, (1, 1)), values, None, Pattern(shape, index))).sum().backward()
        linear(x, values, None, index.int(), (22, 5)).sum().backward()
        assert values.grad is not None
        return values.grad

    for threads in (1, 2):
        monkeypatch.setattr(library, "threads", lambda threads=threads: threads)
        wanted = gradient()
        for number in range(20):
            fail_after.value = number
            try:
                result = gradient()
            except MemoryError:
                continue
            assert torch.equal(result, wanted)
            break
        assert number >= 6  # patterns, sums and scratch, at least, were refused
        fail_after.value = -1
        assert torch.equal(gradient(), wanted)


def test_activations_without_memory_raise_and_free_what_was_idle() -> None:
    arena.clear()
    del_me = arena.take((1, 1, 64, 64))
    del del_me
    assert arena.idle_bytes() > 0
    with pytest.raises(MemoryError, match="there is no memory for"):
        arena.take((1 << 20, 1 << 10, 1 << 10, 1 << 6))
    assert arena.idle_bytes() == 0
    assert arena.take((1, 1, 4, 4)).shape == (1, 1, 4, 4, 16)
