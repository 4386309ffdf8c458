"""SRigL: RigL with a constant fan-in that removes units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight, highest
from equipoise.topology.pattern import ranks
from equipoise.topology.rigl import RigL
from equipoise.topology.schedule import Window


@dataclass(frozen=True, kw_only=True)
class SRigL(RigL):
    """SRigL (Lasby et al. 2024): RigL with the same number of weights for every output; weak outputs are removed.

    An update exchanges K of the A active weights of a layer with n units (outputs) and k = count / n weights per unit:

    1. A weight is salient if it is one of the A - K largest active weights or has one of the K largest gradients.
    2. A unit with fewer than max(1, ⌊min_salience·k⌋) salient weights is removed: all its weights are dropped. It
       returns at a later update if enough of its gradients are salient.
    3. The n' units that remain have k' = ⌊count / n'⌋ weights each. Of the A - K largest active weights every unit
       keeps at most its k' largest, and it grows the ones with the largest gradients until it has k'.

    The layer thus has n'·k' active weights, fewer than its count by less than n'. As many units remain as the count
    needs, the most salient ones. The last weight stays dense by default: its units are the outputs of the model.

    Args:
        min_salience: γ_sal, the fraction of k. 0 removes only units without any salient weight.
    """

    pattern: str = "fan_in"
    dense_last: bool = True
    regrow: bool = True
    min_salience: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern:
            raise UserError('pattern="": SRigL has the pattern "fan_in"; use rigl without a pattern')
        if not 0 <= self.min_salience <= 1:
            raise UserError(f"min_salience={self.min_salience}: a fraction of the fan-in must be between 0 and 1")

    def pattern_obstacle(self) -> str | None:
        return None if self.pattern == "fan_in" else 'SRigL has the pattern "fan_in"; use rigl for other patterns'

    def choose(
        self, layer: SparseWeight, window: Window, step: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        exchanged = self._swap(layer, layer.active, window.progress(step))
        if exchanged == 0:
            return None
        kept = layer.active - exchanged
        on = layer.mask().flatten(1)
        drop = self.drop_score(layer).nan_to_num().view(on.shape).masked_fill(~on, -torch.inf)
        grow = self.growth_score(layer, generator).nan_to_num().view(on.shape)
        units = self._remaining((_top(drop, kept) | _top(grow, exchanged)).sum(1), layer.final, on.shape[1])
        fan_in = min(layer.final // int(units.sum()), on.shape[1])
        drop = drop.masked_fill(~units, -torch.inf)
        stay = _top(drop, kept) & on & units & (ranks(-drop) < fan_in)
        if not self.regrow:
            grow = grow.masked_fill(on, -1)  # grown only if a unit has no other weights
        missing = units * (fan_in - stay.sum(1, keepdim=True))
        grown = ranks(-grow.masked_fill(stay, -torch.inf)) < missing
        return (on & ~stay).flatten().nonzero().flatten(), grown.flatten().nonzero().flatten()

    def _remaining(self, salient: Tensor, count: int, inputs: int) -> Tensor:
        """Column of the units that are not removed, for the number of salient weights of each unit."""
        least = max(1, math.floor(self.min_salience * count / len(salient)))
        needed = math.ceil(count / inputs)
        order = ranks(-salient.view(1, -1).double()).flatten()
        return ((salient >= least) | (order < needed)).view(-1, 1)


def _top(score: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest scores."""
    chosen = highest(score.flatten(), count)
    return torch.zeros_like(score, dtype=torch.bool).view(-1).index_fill_(0, chosen, True).view_as(score)
