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
    """GMP (Zhu & Gupta 2017): prune the smallest weights along a cubic, from `initial_sparsity` to `sparsity`.

    s_t = s_f + (s_i - s_f)·(1 - progress)³ in every layer, towards the counts of the distribution. The last
    update inside the window reaches the final counts exactly. Defaults: from dense, every 100 steps, until 75 %.
    """

    initial_sparsity: float = 0.0
    drop_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.initial_sparsity <= self.sparsity:
            raise UserError(f"initial_sparsity={self.initial_sparsity}: between 0 and the final {self.sparsity}")

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        final = self.final_counts(shapes, model)
        if self.initial_sparsity == 0:
            return {name: math.prod(shape) for name, shape in shapes.items()}
        if not isinstance(self.distribution, str):
            raise UserError("explicit densities go with initial_sparsity=0: they say where to end, not to start")
        start = active_counts(self.distribution, shapes, 1 - self.initial_sparsity, model)
        return {name: max(start[name], final[name]) for name in final}

    def window(self, total_steps: int | None) -> Window:
        window = super().window(total_steps)
        if not window.last_update:
            raise UserError(
                f"every={self.every}: no update falls inside {window.total} steps, nothing would be pruned"
            )
        return window

    def target(self, layer: SparseWeight, completion: float) -> int:
        """The cubic from the layer's initial count to its final one, never growing."""
        left = (layer.initial - layer.final) * (1 - min(completion, 1.0)) ** 3
        return min(layer.active, layer.final + round(left))
