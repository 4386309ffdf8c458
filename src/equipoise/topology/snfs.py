"""Sparse networks from scratch: growth by momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.layer import Layer
from equipoise.topology.algorithm import Dynamic


@dataclass(frozen=True, kw_only=True)
class SNFS(Dynamic):
    """SNFS (Dettmers & Zettlemoyer 2019): drop the smallest weights, grow where the smoothed gradient is largest.

    The momentum m ← μ·m + (1-μ)·g of all places is kept here and not read from the optimizer, so that it works
    with any optimizer; it costs one dense copy. Counts per layer stay fixed (no redistribution between layers).
    momentum: μ = 0.9. Defaults of the paper: drop fraction 0.5, by cosine to 0.
    """

    until: float = 1.0
    drop_fraction: float = 0.5
    momentum: float = 0.9

    dense_gradient: ClassVar[Literal["never", "at updates", "always"]] = "always"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum={self.momentum}: in [0, 1), such as 0.9")

    def observe(self, layer: Layer) -> None:
        gradient = layer.gradient
        if gradient is None:
            return
        if layer.loss_scale is not None:  # it changes on the way, and what is remembered would not
            gradient = gradient / layer.loss_scale.to(gradient)
        memory = torch.zeros_like(gradient) if layer.memory is None else layer.memory.to(gradient)
        # A fused optimizer under AMP steps on an overflow too; one infinity would stay for ever.
        layer.memory = memory.lerp_(gradient.nan_to_num(0, 0, 0), 1 - self.momentum)

    def growth_score(self, layer: Layer, generator: torch.Generator) -> Tensor:
        """|m|; random for a weight that never took part in the loss."""
        return super().growth_score(layer, generator) if layer.memory is None else layer.memory.abs()
