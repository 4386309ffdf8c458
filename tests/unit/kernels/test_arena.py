"""Lent buffers and their borders."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from equipoise.kernels import arena, library, operators
from equipoise.kernels.blocked import Blocked, from_blocked
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.taps import Pattern


def test_buffers_are_used_again_and_keep_their_border() -> None:
    arena.clear()
    first = arena.take((2, 3, 4, 5), (1, 2))
    address = first.data_ptr()
    first.fill_(7.0)
    del first
    again = arena.take((2, 3, 4, 5), (1, 2))
    assert again.data_ptr() == address
    whole = again.as_strided((2, 3, 6, 9, 16), (3 * 6 * 9 * 16, 6 * 9 * 16, 9 * 16, 16, 1), 0)
    assert float(whole.sum()) == 7.0 * again.numel()
    assert arena.take((2, 3, 4, 5), (1, 2)).data_ptr() != address


def test_the_border_belongs_to_the_tensor_and_not_to_its_memory() -> None:
    lent = arena.take((1, 2, 4, 4), (1, 2))
    assert arena.has_border(lent, (1, 2))
    assert not arena.has_border(lent, (2, 0))
    assert arena.has_border(lent.copy_(torch.ones(1, 2, 4, 4, 16)), (1, 2))  # in place
    for other in (lent[:, :, 1:3], lent.detach(), lent.clone(), lent + 1):
        assert not arena.has_border(other, (1, 1))


@pytest.mark.skipif(not library.available(), reason=library.reason())
def test_a_tensor_from_elsewhere_is_copied_into_a_border() -> None:
    inner = torch.ones(1, 1, 4, 4, 16)[:, :, 1:3, 1:3]
    pattern = Pattern(ConvShape(1, 1, (3, 3), padding=(1, 1)), torch.arange(9))
    out = operators.conv(Blocked(inner, 16), torch.ones(9), None, pattern)
    assert torch.equal(from_blocked(out)[0, 0], torch.full((2, 2), 4.0))


def test_loans_without_memory_are_dropped_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    loan = arena._Loan.__new__(arena._Loan)
    del loan
    gc.collect()
    assert not seen


MIB = 1 << 20


def lend(count: int, columns: int = 128) -> list[torch.Tensor]:
    """Tensors of 1 MiB each if `columns` is 128."""
    return [arena.take((1, 1, 128, columns)) for _ in range(count)]


def test_idle_memory_is_bounded_whatever_shapes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "IDLE_BYTES", 4 * MIB)
    monkeypatch.setattr(arena, "WINDOW", 10)
    arena.clear()
    lend(12)  # returned at once
    for columns in range(128, 160):
        lend(1, columns)
        lend(1, columns)
    assert 3 * MIB <= arena.idle_bytes() <= 4 * MIB


def test_memory_that_was_lent_at_one_time_is_kept_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "IDLE_BYTES", MIB)
    arena.clear()
    first = {tensor.data_ptr() for tensor in (*lend(10), *lend(10, 136))}
    assert 20 * MIB <= arena.idle_bytes() <= 22 * MIB
    assert {tensor.data_ptr() for tensor in (*lend(10), *lend(10, 136))} == first


def test_memory_is_never_lent_to_two_threads() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(300):
            tensor = arena.take((1, 1, 4, int(torch.randint(1, 4, (), generator=generator))))
            tensor.fill_(number)
            time.sleep(0)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
