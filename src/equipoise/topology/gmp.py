"""Gradual magnitude pruning: from dense (or less sparse) to sparse during training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Dynamic
from equipoise.topology.distribution import Shapes, active_counts
from equipoise.topology.schedule import Window


@dataclass(frozen=True, kw_only=True)
class GMP(Dynamic):
    """GMP (Zhu & Gupta 2017): prune the smallest weights on a cubic schedule.

    The sparsity of every layer is s_t = s_f + (s_i - s_f)·(1 - progress)³; the distribution gives s_f. The last
    update inside the window reaches the final counts exactly. By default training starts dense and prunes every 100
    steps until 75 % of training.

    Args:
        initial_sparsity: Sparsity s_i at the start.
        drop_fraction: Fraction of the active weights that an update exchanges in addition; 0 in GMP.
    """

    initial_sparsity: float = 0.0
    drop_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.initial_sparsity <= self.sparsity:
            raise UserError(
                f"initial_sparsity={self.initial_sparsity}: must be between 0 and sparsity={self.sparsity}"
            )

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        final = self.final_counts(shapes, model)
        if self.initial_sparsity == 0:
            return {name: math.prod(shape) for name, shape in shapes.items()}
        if not isinstance(self.distribution, str):
            raise UserError("explicit densities are final densities and need initial_sparsity=0")
        start = active_counts(self.distribution, shapes, 1 - self.initial_sparsity, model)
        return {name: max(start[name], final[name]) for name in final}

    def window(self, total_steps: int | None) -> Window:
        window = super().window(total_steps)
        if not window.last_update:
            raise UserError(
                f"every={self.every}: no update falls inside {window.total} steps, so nothing would be pruned; "
                "choose a smaller `every`"
            )
        return window

    def target(self, layer: SparseWeight, completion: float) -> int:
        """Count on the cubic from the initial to the final count of the layer; it never increases."""
        left = (layer.initial - layer.final) * (1 - min(completion, 1.0)) ** 3
        return min(layer.active, layer.final + round(left))
