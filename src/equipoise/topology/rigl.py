"""RigL: grow the weights with the largest gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import DenseGradient, Dynamic


@dataclass(frozen=True, kw_only=True)
class RigL(Dynamic):
    """RigL (Evci et al. 2020): drop the smallest weights, grow those with the largest gradient.

    The defaults are those of the paper: updates every 100 steps until 75 % of training, drop fraction from 0.3 to 0 by
    cosine, no optimizer step at updates, and no regrowth of weights that the same update dropped.

    Args:
        growth: Grow by the gradient of the `batch` or by the `corrected` gradient (the "-G" variants in AGENT's
            appendix). `corrected` makes a gradient correction also keep the old gradients of inactive weights.
    """

    step_at_update: Literal["take", "skip"] = "skip"
    regrow: bool = False
    growth: Literal["batch", "corrected"] = "batch"

    dense_gradient: ClassVar[DenseGradient] = "at updates"
    itop_every: ClassVar[int] = 4000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth not in ("batch", "corrected"):
            raise UserError(f'growth="{self.growth}": expected "batch" or "corrected"')

    def packing_obstacle(self) -> str | None:
        return None if self.growth == "batch" else 'growth="corrected" needs old gradients of inactive weights'

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        """|∂loss/∂w|; random for a weight that took no part in the loss."""
        return super().growth_score(layer, generator) if layer.gradient is None else layer.gradient.abs()
