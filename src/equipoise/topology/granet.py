"""GraNet: gradual pruning with regrowth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.gmp import GMP


@dataclass(frozen=True, kw_only=True)
class GraNet(GMP):
    """GraNet (Liu et al. 2021): GMP's cubic, and at each update a share of the weights is regrown by gradient.

    Sparse to sparse by default: from 50 % sparsity; drop fraction 0.5 by cosine to 0. Pruning is per layer towards
    the counts of the distribution (the original compares magnitudes across layers).
    """

    initial_sparsity: float = 0.5
    drop_fraction: float = 0.5

    dense_gradient: ClassVar[Literal["never", "at updates", "always"]] = "at updates"

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        """|∂loss/∂w|; random for a weight that took no part in the loss."""
        return super().growth_score(layer, generator) if layer.gradient is None else layer.gradient.abs()
