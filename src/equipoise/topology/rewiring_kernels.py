"""The functions of BSR-Net's rewiring that run on the device, over plain tensors: an engine can compile them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.storage.masked import ACTIVE, DROPPED

BLOCK = 64  # indices counted together; no two weights share a block
SPREAD = 128  # counters for each weight, so that atomic additions seldom meet at one of them


def cross(
    weights: Tensor,
    activity: Tensor,
    signs: Tensor,
    bits: Tensor | None,
    scale: float | Tensor,
    drop: bool,
) -> None:
    """Add noise to active weights, and set weights that have crossed zero and inactive weights to zero, in place.

    Args:
        weights: The weights.
        activity: `ACTIVE`, `DROPPED` or `NEVER` for each weight; changed if `drop`.
        signs: Sign of each weight; 0 marks elements that are not sparse.
        bits: 15 random bits for each weight, from which normal noise is made; `None` for no noise.
        scale: Standard deviation of the noise.
        drop: Whether weights that have crossed zero become inactive.
    """
    active = activity == ACTIVE
    own = active & (signs != 0)
    new = weights if bits is None else torch.where(own, weights + normal(bits).to(weights.dtype) * scale, weights)
    crossed = own & (new * signs <= 0)
    weights.copy_(torch.where(active & ~crossed, new, 0))
    if drop:
        activity.copy_(torch.where(crossed, DROPPED, activity))


def normal(bits: Tensor) -> Tensor:
    """Turn the low 15 bits of integers into standard normal numbers: quantiles of 32,768 intervals."""
    return math.sqrt(2) * torch.erfinv(((bits & 0x7FFF).float() + 0.5) / 2**14 - 1)


def find_new(
    activity: Tensor,
    end: int,
    first: Tensor,
    last: Tensor,
    budget: int,
    trained: Tensor | None,
    drawn: Tensor,
    bounds: Tensor,
) -> tuple[Tensor, Tensor]:
    """Choose the indices of new connections in a vector of all weights, as `Rewiring.refill` describes.

    Args:
        activity: Activity of all weights.
        end: End of the blocks that are counted.
        first: First block of each weight.
        last: Last block of each weight.
        budget: Number of connections of the whole network.
        trained: Whether each weight is trained, `None` if all are; the others get no connection.
        drawn: Two rows of random integers, one for each possible connection.
        bounds: Cumulative sizes of the weights.

    Returns:
        An index for each possible connection, the last one of `activity` if it is not wanted, and whether it is wanted.
    """
    counted = (activity[:end].view(-1, BLOCK) >= 0).sum(1, dtype=torch.int32)
    inactive = counted.cumsum(0, dtype=torch.int32)  # up to the end of each block
    before = torch.where(first > 0, inactive[(first - 1).clamp(min=0)], 0).long()
    room = inactive[last] - before
    missing = budget - (bounds[-1] - room.sum())
    counts = distribute(missing, room if trained is None else room * trained, drawn[0], bounds)
    rank, wanted = choose(missing, counts, room, before, drawn[1])
    block = torch.searchsorted(inactive, rank + 1).clamp(max=len(inactive) - 1)
    return find(activity, inactive, block, rank, wanted), wanted


def distribute(missing: Tensor, room: Tensor, drawn: Tensor, bounds: Tensor) -> Tensor:
    """Return the number of new connections of each weight.

    Args:
        missing: Number of missing connections.
        room: Number of inactive indices of each weight.
        drawn: Random integers, one for each possible connection.
        bounds: Cumulative sizes of the weights.
    """
    number, layers = torch.arange(len(drawn), device=drawn.device), len(bounds)
    layer = torch.searchsorted(bounds, drawn % bounds[-1], right=True)
    layer = torch.where(number < missing, layer, layers)
    bins = drawn.new_zeros((layers + 1) * SPREAD)
    bins.scatter_add_(0, layer * SPREAD + number % SPREAD, torch.ones_like(drawn))
    counts = bins.view(layers + 1, SPREAD).sum(1)[:layers]
    taken = torch.minimum(counts, room)
    left, free = (counts - taken).sum(), (room - taken).cumsum(0)
    extra = left * free // free[-1].clamp(min=1)
    return taken + torch.diff(extra, prepend=extra.new_zeros(1))


def choose(missing: Tensor, counts: Tensor, room: Tensor, before: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each new connection among the inactive indices, and whether it is wanted.

    Args:
        missing: Number of missing connections.
        counts: Number of new connections of each weight.
        room: Number of inactive indices of each weight.
        before: Number of inactive indices before those of each weight; zeros give ranks within the weight.
        drawn: Random integers, one for each possible connection.
    """
    number = torch.arange(len(drawn), device=drawn.device)
    ends = counts.cumsum(0)
    layer = torch.searchsorted(ends, number, right=True).clamp(max=len(counts) - 1)
    count, space = counts[layer].clamp(min=1), room[layer]
    k = number - (ends[layer] - counts[layer])
    low, high = k * space // count, (k + 1) * space // count
    rank = before[layer] + low + drawn % (high - low).clamp(min=1)
    return rank.to(torch.int32), number < missing


def find(activity: Tensor, inactive: Tensor, block: Tensor, rank: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of each rank among the inactive indices; the last index of all for ranks that are not wanted.

    Args:
        activity: Activity of all weights.
        inactive: Number of inactive indices up to the end of each block.
        block: Block that contains each rank.
        rank: Ranks among the inactive indices.
        wanted: Whether each rank is wanted.
    """
    earlier = torch.where(block > 0, inactive[(block - 1).clamp(min=0)], 0)
    window = activity[block[:, None] * BLOCK + torch.arange(BLOCK, device=activity.device)] >= 0
    upto = window.cumsum(1, dtype=torch.int32)
    offset = (upto <= (rank - earlier)[:, None]).sum(1)
    return torch.where(wanted, block * BLOCK + offset, len(activity) - 1)
