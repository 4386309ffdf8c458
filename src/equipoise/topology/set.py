"""SET: sparse evolutionary training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Dynamic
from equipoise.topology.schedule import Decay


@dataclass(frozen=True, kw_only=True)
class SET(Dynamic):
    """SET (Mocanu et al. 2018): drop the smallest weights, grow as many at random indices.

    By default the drop fraction ζ is constant at 0.3, with an update every 100 steps until the end.

    Args:
        criterion: `magnitude`, or `signed` as in the original paper: drop the same fraction ζ of the smallest positive
            and of the largest negative weights.
    """

    until: float = 1.0
    drop_decay: Decay = "constant"
    criterion: Literal["magnitude", "signed"] = "magnitude"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion not in ("magnitude", "signed"):
            raise UserError(f'criterion="{self.criterion}": expected "magnitude" or "signed"')
        for name in ("min_fan_in", "pattern"):
            if self.criterion == "signed" and getattr(self, name):
                raise UserError(f'{name}={getattr(self, name)}: only with criterion="magnitude"')

    def drop(self, layer: SparseWeight, count: int) -> Tensor:
        if self.criterion == "magnitude" or count == 0:
            return super().drop(layer, count)
        return _drop_by_sign(layer, count)


def _drop_by_sign(layer: SparseWeight, count: int) -> Tensor:
    """Return the positive and negative weights nearest to zero, in proportion to the number of each sign.

    The number of positive weights stays on the device, so that the CPU never waits for a GPU: `count` candidates of
    each sign are sorted, and the device chooses among them.
    """
    weight = layer.weight
    negative = layer.mask().reshape(-1) & (weight < 0)
    positive = layer.mask().reshape(-1) & ~negative  # includes grown weights that are still zero
    sides = [layer.lowest(weight.abs(), count, side, ordered=True) for side in (positive, negative)]
    have = positive.sum(), negative.sum()
    ideal = (count * have[0] / layer.active).round().long()
    from_positive = torch.minimum(torch.maximum(ideal, count - have[1]), have[0])
    rank = torch.arange(count, device=weight.device)
    return torch.where(rank < from_positive, sides[0], sides[1][(rank - from_positive).clamp(min=0)])
