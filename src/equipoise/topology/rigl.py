"""RigL and its kin: growth where the gradient is largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Dynamic


@dataclass(frozen=True, kw_only=True)
class RigL(Dynamic):
    """RigL (Evci et al. 2020): drop the smallest weights, grow where the gradient is largest.

    Defaults of the paper: every 100 steps until 75 % of training, drop fraction 0.3 by cosine to 0, no optimizer
    step at updates, no regrowth of what the same update dropped.
    growth: by the gradient of the `batch`, or by the `corrected` one (the "-G" variants of AGENT's appendix), which
    makes a gradient correction keep the old gradients of inactive places too.
    """

    step_at_update: Literal["take", "skip"] = "skip"
    regrow: bool = False
    growth: Literal["batch", "corrected"] = "batch"

    dense_gradient: ClassVar[Literal["never", "at updates", "always"]] = "at updates"
    itop_every: ClassVar[int] = 4000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth not in ("batch", "corrected"):
            raise UserError(f'growth="{self.growth}": it is "batch" or "corrected"')

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        """|∂loss/∂w|; random for a weight that took no part in the loss."""
        return super().growth_score(layer, generator) if layer.gradient is None else layer.gradient.abs()
