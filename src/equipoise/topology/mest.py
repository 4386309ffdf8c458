"""MEST: drop by weight and gradient together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Dynamic


@dataclass(frozen=True, kw_only=True)
class MEST(Dynamic):
    """MEST (Yuan et al. 2021): drop the lowest |w| + λ·|g| of the active weights, grow at random.

    The drop fraction decays by cosine (elastic mutation). The memory bound is the hard one of the paper: the
    number of active weights never rises.

    Args:
        gradient_weight: λ.
    """

    until: float = 1.0
    gradient_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_weight < 0:
            raise UserError(f"gradient_weight={self.gradient_weight}: λ of |w| + λ·|g| must not be negative")

    def drop_score(self, layer: SparseWeight) -> Tensor:
        score = layer.weight.abs()
        return score if layer.gradient is None else score + self.gradient_weight * layer.gradient.abs()
