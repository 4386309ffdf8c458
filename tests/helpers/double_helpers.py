"""Trainers in float64, in which the order of a sum changes it by 1e-16 only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make every floating-point tensor of the block in float64: a trainer made in it trains in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
