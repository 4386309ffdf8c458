"""SNFS: sparse networks from scratch, with growth by momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import DenseGradient, Dynamic


@dataclass(frozen=True, kw_only=True)
class SNFS(Dynamic):
    """SNFS (Dettmers & Zettlemoyer 2019): drop the smallest weights, grow those with the largest momentum.

    The momentum m ← μ·m + (1-μ)·g of all weights is kept here and not read from the optimizer, so that any optimizer
    works. In a user's loop g is unscaled and clipped like `.grad`, unless a correction has changed `.grad`. The
    momentum takes the memory of one dense copy. Counts per layer stay fixed: weights are not redistributed between
    layers. As in the paper, the drop fraction decays from 0.5 to 0 by cosine.

    Args:
        momentum: μ.
    """

    until: float = 1.0
    drop_fraction: float = 0.5
    momentum: float = 0.9

    dense_gradient: ClassVar[DenseGradient] = "always"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum={self.momentum}: must be in [0, 1), such as 0.9")

    def observe(self, layer: SparseWeight, scale: Tensor | None) -> None:
        gradient = layer.local_gradient
        if gradient is None:
            return
        if scale is not None:  # the loss scale changes during training, the momentum must not
            gradient = gradient / scale.to(gradient)
        memory = torch.zeros_like(gradient) if layer.memory is None else layer.memory.to(gradient)
        # An infinity would stay in the momentum.
        layer.memory = memory.lerp_(gradient.nan_to_num(0, 0, 0), 1 - self.momentum)

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        """|m|; random for a weight that never took part in the loss."""
        return super().growth_score(layer, generator) if layer.memory is None else layer.whole(layer.memory).abs()
