"""Gradual magnitude pruning: from dense (or less sparse) to sparse during training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self

from torch import nn

from equipoise.config import shown
from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Dynamic
from equipoise.topology.distribution import Shapes, active_counts
from equipoise.topology.pattern import parse_pattern
from equipoise.topology.schedule import Window

INITIAL_FACTOR = 10  # active weights at the start relative to the end, if `initial_sparsity` is `auto`


@dataclass(frozen=True, kw_only=True)
class GMP(Dynamic):
    """GMP (Zhu & Gupta 2017): prune the smallest weights on a cubic schedule.

    The sparsity of every layer is s_t = s_f + (s_i - s_f)·(1 - progress)³; the distribution gives s_f. The last
    update inside the window reaches the final counts exactly. By default training starts dense and prunes every 100
    steps until 75 % of training.

    Args:
        initial_sparsity: Sparsity s_i at the start. `auto` starts with ten times the final number of active weights:
            at 90 % for a final 99 %, at 50 % for 95 %, dense for 90 % or less.
        drop_fraction: Fraction of the active weights that an update exchanges in addition; 0 in GMP.
    """

    initial_sparsity: float | Literal["auto"] = 0.0
    drop_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        initial = self.initial_sparsity
        if initial != "auto" and not (isinstance(initial, Real) and 0 <= initial <= self.sparsity):
            raise UserError(
                f'initial_sparsity={shown(initial)}: must be "auto" or between 0 and sparsity={self.sparsity}'
            )

    @classmethod
    def fast(cls, **options: Any) -> Self:
        return super().fast(**{"initial_sparsity": "auto", **options})

    @property
    def start(self) -> float:
        """Sparsity s_i at the start, as a number."""
        if self.initial_sparsity == "auto":
            return max(0.0, round(1 - INITIAL_FACTOR * (1 - self.sparsity), 12))
        return self.initial_sparsity

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        final = self.final_counts(shapes, model)
        if self.start == 0:
            return {name: math.prod(shape) for name, shape in shapes.items()}
        if not isinstance(self.distribution, str):
            raise UserError("explicit densities are final densities and need initial_sparsity=0")
        start = active_counts(self.distribution, shapes, 1 - self.start, model)
        pattern = parse_pattern(self.pattern)
        if pattern is not None:
            start = {name: pattern.whole(count, shapes[name]) for name, count in start.items()}
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
