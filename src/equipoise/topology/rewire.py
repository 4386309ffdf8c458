"""BSR-Net's refilling of the network to its budget, without a look at the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.seeds import derive
from equipoise.storage.masked import ACTIVE
from equipoise.topology.bsr import NEWBORN, BSRNet

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology

BLOCK = 64  # places counted together; no two layers share a block
SPREAD = 128


class Rewiring:
    """After every step, all missing connections at once, on vectors of all weights.

    How many are missing is known on the device alone, so everything has the size of the budget and what is not
    missing is written to a spare place. Layers are drawn in proportion to size. The n places that a layer gets are
    one from each of n equal shares of its inactive ones, so that no place is drawn twice: each is equally likely,
    and after every step the count is exact. What falls on full layers goes to the others by the room they have.
    """

    def __init__(
        self,
        algorithm: BSRNet,
        topology: Topology,
        weights: Tensor,
        places: Tensor,
        signs: Tensor,
        starts: list[int],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._algorithm, self._topology = algorithm, topology
        self.generator = torch.Generator(weights.device)
        self.scale = algorithm.noise
        self._weights, self._places, self.signs = weights, places, signs
        layers = topology.layers
        ends = [start + layer.size for start, layer in zip(starts, layers, strict=True)]
        device = weights.device
        self._first = torch.tensor([start // BLOCK for start in starts], device=device)
        self._last = torch.tensor([(end - 1) // BLOCK for end in ends], device=device)
        self._end = (max(ends) - 1) // BLOCK * BLOCK + BLOCK
        self._bounds = torch.tensor([layer.size for layer in layers], device=device).cumsum(0)
        self._total = sum(layer.size for layer in layers)
        self._budget = sum(layer.final for layer in layers)
        self._count, self._share_out = compiled(count_inactive), compiled(share_out)
        self._choose, self._find = compiled(choose), compiled(find)

    def seed(self) -> None:
        """For the draws of the coming step."""
        self.generator.manual_seed(derive(self._algorithm.seed, "rewire", self._topology.steps))

    def noise(self) -> Tensor:
        """Standard normal noise for all weights."""
        weights = self._weights
        return torch.randn(len(weights), generator=self.generator, device=weights.device, dtype=weights.dtype)

    @torch.no_grad()
    def refill(self) -> None:
        inactive = self._count(self._places[: self._end]).cumsum(0, dtype=torch.int32)  # up to each block's end
        drawn = torch.randint(2**62, (2, self._budget), generator=self.generator, device=inactive.device)
        before = torch.where(self._first > 0, inactive[(self._first - 1).clamp(min=0)], 0).long()
        room = inactive[self._last] - before
        missing = self._budget - (self._total - room.sum())
        counts = self._share_out(missing, room, drawn[0], self._bounds)
        rank, wanted = self._choose(missing, counts, room, before, drawn[1])
        block = torch.searchsorted(inactive, rank + 1).clamp(max=len(inactive) - 1)
        where = self._find(self._places, inactive, block, rank, wanted)
        self._weights[where] = self.signs[where] * NEWBORN
        self._places[where] = torch.where(wanted, ACTIVE, self._places[where]).to(torch.int8)


def count_inactive(places: Tensor) -> Tensor:
    """How many places of each block are free."""
    return (places.view(-1, BLOCK) >= 0).sum(1, dtype=torch.int32)


def share_out(missing: Tensor, room: Tensor, drawn: Tensor, bounds: Tensor) -> Tensor:
    """How many of the missing each layer gets: each drawn in proportion to size, as far as there is room."""
    number, layers = torch.arange(len(drawn), device=drawn.device), len(bounds)
    layer = torch.searchsorted(bounds, drawn % bounds[-1], right=True)
    layer = torch.where(number < missing, layer, layers)
    # each layer is counted in many places at once, or the additions would queue up
    bins = drawn.new_zeros((layers + 1) * SPREAD)
    bins.scatter_add_(0, layer * SPREAD + number % SPREAD, torch.ones_like(drawn))
    counts = bins.view(layers + 1, SPREAD).sum(1)[:layers]
    taken = torch.minimum(counts, room)
    left, free = (counts - taken).sum(), (room - taken).cumsum(0)
    extra = left * free // free[-1].clamp(min=1)
    return taken + torch.diff(extra, prepend=extra.new_zeros(1))


def choose(missing: Tensor, counts: Tensor, room: Tensor, before: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The rank of each new connection's place among all inactive ones, and which of the ranks are wanted."""
    number = torch.arange(len(drawn), device=drawn.device)
    ends = counts.cumsum(0)
    layer = torch.searchsorted(ends, number, right=True).clamp(max=len(counts) - 1)
    count, space = counts[layer].clamp(min=1), room[layer]
    k = number - (ends[layer] - counts[layer])
    low, high = k * space // count, (k + 1) * space // count
    rank = before[layer] + low + drawn % (high - low).clamp(min=1)
    return rank.to(torch.int32), number < missing


def find(places: Tensor, inactive: Tensor, block: Tensor, rank: Tensor, wanted: Tensor) -> Tensor:
    """The places of these ranks, each known to lie in a block; the last place of all for those not wanted."""
    earlier = torch.where(block > 0, inactive[(block - 1).clamp(min=0)], 0)
    window = places[block[:, None] * BLOCK + torch.arange(BLOCK, device=places.device)] >= 0
    upto = window.cumsum(1, dtype=torch.int32)
    offset = (upto <= (rank - earlier)[:, None]).sum(1)
    return torch.where(wanted, block * BLOCK + offset, len(places) - 1)
