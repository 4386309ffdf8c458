"""GraNet: gradual pruning with regrowth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import DenseGradient
from equipoise.topology.gmp import GMP


@dataclass(frozen=True, kw_only=True)
class GraNet(GMP):
    """GraNet (Liu et al. 2021): GMP that also exchanges weights, growing those with the largest gradient.

    By default training starts at 50 % sparsity, and the drop fraction decays from 0.5 to 0 by cosine. Each layer is
    pruned towards its count in the distribution; the original compares magnitudes across layers.
    """

    initial_sparsity: float | Literal["auto"] = 0.5
    drop_fraction: float = 0.5

    dense_gradient: ClassVar[DenseGradient] = "at updates"

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        """|∂loss/∂w|; random for a weight that took no part in the loss."""
        return super().growth_score(layer, generator) if layer.gradient is None else layer.gradient.abs()
