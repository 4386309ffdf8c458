"""Memory in huge pages is zero, does not overlap, and is private to a process."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.kernels.huge_pages import FLOAT, HUGE_PAGE, Slab, zeros


@pytest.mark.parametrize("count", [0, 1, HUGE_PAGE // FLOAT - 1, HUGE_PAGE // FLOAT, 3 * HUGE_PAGE // FLOAT + 5])
def test_zeros_are_zeros_that_can_be_written(count: int) -> None:
    memory = zeros(count)
    assert memory.shape == (count,)
    assert memory.dtype == np.float32
    assert not memory.any()
    memory.fill(2)
    assert memory.sum(dtype=np.float64) == 2.0 * count


def test_large_memory_begins_with_a_huge_page() -> None:
    assert zeros(HUGE_PAGE).ctypes.data % HUGE_PAGE == 0


def test_a_forked_process_has_its_own() -> None:
    memory = zeros(HUGE_PAGE)
    child = os.fork()
    if child == 0:
        memory[:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not memory.any()


@given(st.lists(st.integers(0, 3000), max_size=20))
def test_pieces_of_a_slab_do_not_overlap(counts: list[int]) -> None:
    slab = Slab(chunk=8192)
    pieces = [slab.take(count) for count in counts]
    for number, piece in enumerate(pieces, 1):
        assert not piece.any()
        assert piece.ctypes.data % 64 == 0 or not len(piece)
        piece.fill(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))


def test_huge_pages_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_HUGE_PAGES", "off")
    slab = Slab()
    one, other = slab.take(8), slab.take(8)
    assert one.base is other.base is zeros(2 * HUGE_PAGE).base is None  # they own their memory
