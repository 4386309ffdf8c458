"""Structured sparsity: which sets of weights are active together, and how many of each group."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError


@dataclass(frozen=True)
class Pattern(ABC):
    """Divides a weight into units, which are active or inactive as a whole, and the units into groups.

    Every group of a weight has the same number of active units.
    """

    @abstractmethod
    def obstacle(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot have the pattern; `None` if it can."""

    @abstractmethod
    def arrange(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor shaped like a weight as (groups, units of a group, elements of a unit)."""

    def extent(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Number of groups, of units in a group and of elements in a unit."""
        groups, units, elements = self.arrange(torch.empty(tuple(shape), device="meta")).shape
        return groups, units, elements

    def final_count(self, count: int, shape: Sequence[int]) -> int:
        """Number of active weights at the end, for a number that the distribution gives the weight."""
        return self.whole(count, shape)

    def whole(self, count: int, shape: Sequence[int]) -> int:
        """Round a number of active weights to the same number of units in every group, at least one."""
        groups, units, elements = self.extent(shape)
        return groups * elements * min(max(round(count / (groups * elements)), 1), units)

    # Choosing units. A score has one number for each weight; that of a unit is the sum.

    def largest(self, score: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        """Flat indices of the units with the largest scores, the same number in every group.

        Args:
            score: One number for each weight, as a vector.
            count: Number of weights to choose, as `whole` gives it.
            shape: Shape of the weight.
        """
        scores = self._score(score, shape)
        chosen = scores.topk(count // (scores.shape[0] * self.extent(shape)[2]), dim=1).indices
        return self._indices(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True), shape)

    def exchange(
        self, drop: Tensor, grow: Tensor, active: Tensor, prune: int, swap: int, regrow: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the flat indices to drop and to grow.

        Every group loses the same number of its lowest units by pruning. Of the others, those with the lowest scores of
        all groups are exchanged for the highest inactive ones of their group, so that every group keeps its number.

        Args:
            drop: Score of each weight; the lowest active units are dropped.
            grow: Score of each weight; the highest inactive units are grown.
            active: Mask of the active weights, in the shape of the weight.
            prune: Number of weights by which the update reduces the active ones.
            swap: Number of weights to exchange; rounded to whole units, and less if too few are inactive.
            regrow: Whether a unit that is dropped may be grown again.
        """
        shape = active.shape
        groups, units, elements = self.extent(shape)
        on = self.arrange(active)[..., 0]
        have, lost = int(on[0].sum()), prune // (groups * elements)
        rank = _rank(self._score(drop, shape).masked_fill(~on, torch.inf))
        most = have - lost if regrow else min(have - lost, units - have)  # exchanged in one group
        pruned = on & (rank < lost)
        candidates = on & (rank >= lost) & (rank < lost + most)
        exchanged = min(round(swap / elements), groups * most)
        lowest = self._score(drop, shape).masked_fill(~candidates, torch.inf).flatten().topk(exchanged, largest=False)
        swapped = torch.zeros_like(on).view(-1).index_fill_(0, lowest.indices, True).view_as(on)
        free = ~(on & ~(pruned | swapped)) if regrow else ~on
        order = _rank(-self._score(grow, shape).masked_fill(~free, -torch.inf))
        grown = free & (order < swapped.sum(1, keepdim=True))
        return self._indices(pruned | swapped, shape), self._indices(grown, shape)

    def _score(self, score: Tensor, shape: Sequence[int]) -> Tensor:
        return (
            self.arrange(score.nan_to_num().view(tuple(shape))).sum(-1).nan_to_num()
        )  # finite: others mark no units

    def _indices(self, chosen: Tensor, shape: Sequence[int]) -> Tensor:
        """Flat indices of the weights of chosen units."""
        index = torch.arange(math.prod(shape), device=chosen.device).view(tuple(shape))
        return self.arrange(index)[chosen].reshape(-1)


@dataclass(frozen=True)
class NM(Pattern):
    """n of every m weights along the inputs of an output, such as 2:4 (Zhou et al. 2021).

    Inputs are the second dimension of a weight: input features, or input channels at one position of a kernel.

    Args:
        n: Active weights of a group.
        m: Weights of a group.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise UserError(f'pattern="{self}": n:m has fewer active weights than weights, such as 2:4')

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that is zero."""
        return 1 - self.n / self.m

    def obstacle(self, shape: Sequence[int]) -> str | None:
        return f"{shape[1]} inputs are no multiple of {self.m}" if shape[1] % self.m else None

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1).reshape(-1, self.m, 1)

    def final_count(self, count: int, shape: Sequence[int]) -> int:
        return math.prod(shape) // self.m * self.n


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of outputs x inputs, such as 16x1 or 4x4, at one position of a kernel; scores are sums over blocks.

    Args:
        outputs: Outputs of a block.
        inputs: Inputs of a block.
    """

    outputs: int
    inputs: int

    def __post_init__(self) -> None:
        if min(self.outputs, self.inputs) < 1 or self.outputs * self.inputs == 1:
            raise UserError(f'pattern="{self}": a block has several weights, such as 16x1')

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs}"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        if shape[0] % self.outputs or shape[1] % self.inputs:
            return f"{shape[0]} outputs and {shape[1]} inputs do not divide into blocks of {self}"
        return None

    def arrange(self, tensor: Tensor) -> Tensor:
        outputs, inputs = tensor.shape[:2]
        parts = tensor.reshape(outputs // self.outputs, self.outputs, inputs // self.inputs, self.inputs, -1)
        return parts.permute(0, 2, 4, 1, 3).reshape(1, -1, self.outputs * self.inputs)


@dataclass(frozen=True)
class FanIn(Pattern):
    """The same number of active weights for every output (constant fan-in; Lasby et al. 2024)."""

    def __str__(self) -> str:
        return "fan_in"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        return None

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0], -1, 1)


PATTERNS: Catalogue[type[Pattern]] = Catalogue("pattern", {"n:m": NM, "block": Block, "fan_in": FanIn})


def parse_pattern(text: str) -> Pattern | None:
    """Return the pattern of a text such as `2:4`, `16x1` or `fan_in`; `None` for an empty text.

    Raises:
        UserError: If there is no such pattern.
    """
    if not text:
        return None
    if text == "fan_in":
        return FanIn()
    for form, kind in ((r"(\d+):(\d+)", NM), (r"(\d+)x(\d+)", Block)):
        if found := re.fullmatch(form, text):
            return kind(int(found[1]), int(found[2]))
    raise UserError(f'pattern="{text}": expected n:m such as "2:4", a block such as "16x1", or "fan_in"')


def _rank(score: Tensor) -> Tensor:
    """Rank of each number in its row, from the lowest; equal numbers in their order."""
    order = score.argsort(dim=1, stable=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(score.shape[1], device=score.device).expand_as(order)
    )
