"""Sparse Evolutionary Training."""

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
    """SET (Mocanu et al. 2018): drop the smallest weights, grow as many at random places.

    criterion: `magnitude`, or `signed` as in the original paper: the same share ζ of the smallest positive and
    of the largest negative weights. Defaults: ζ = 0.3, constant, every 100 steps until the end.
    """

    until: float = 1.0
    drop_decay: Decay = "constant"
    criterion: Literal["magnitude", "signed"] = "magnitude"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion not in ("magnitude", "signed"):
            raise UserError(f'criterion="{self.criterion}": it is "magnitude" or "signed"')

    def drop(self, layer: SparseWeight, count: int) -> Tensor:
        if self.criterion == "magnitude" or count == 0:
            return super().drop(layer, count)
        return _drop_by_sign(layer, count)


def _drop_by_sign(layer: SparseWeight, count: int) -> Tensor:
    """The weights nearest to zero on either side, each side giving its share of `count`.

    The number of positive weights stays on the device: both sides offer `count` places in order, and which
    offers are taken is decided there too, so that a GPU is never waited for.
    """
    weight = layer.weight
    negative = layer.mask().reshape(-1) & (weight < 0)
    positive = layer.mask().reshape(-1) & ~negative  # a weight that is still zero counts here
    sides = [layer.lowest(weight.abs(), count, side, ordered=True) for side in (positive, negative)]
    have = positive.sum(), negative.sum()
    share = (count * have[0] / layer.active).round().long()
    from_positive = torch.minimum(torch.maximum(share, count - have[1]), have[0])
    rank = torch.arange(count, device=weight.device)
    return torch.where(rank < from_positive, sides[0], sides[1][(rank - from_positive).clamp(min=0)])
