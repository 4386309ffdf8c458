"""Patterns of active weights."""

from __future__ import annotations

import torch

from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.taps import Pattern


def test_a_pattern_notices_indices_that_change_in_place() -> None:
    index = torch.tensor([0, 2], dtype=torch.int32)
    pattern = Pattern(ConvShape(2, 2), index)
    assert pattern.fits(index)
    index[1] = 3
    assert not pattern.fits(index)
    index[1] = 2
    assert pattern.fits(index)
    assert pattern.fits(index.clone())
    index.data = torch.tensor([1, 2], dtype=torch.int32)  # as a snapshot does
    assert not pattern.fits(index)
