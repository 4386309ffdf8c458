"""Structured sparsity: which sets of weights are active together, and how many of each group."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.catalogue import Catalogue
from equipoise.config import shown
from equipoise.errors import UserError
from equipoise.storage.sparse_weight import highest


@dataclass(frozen=True)
class Pattern(ABC):
    """Divides a weight into units, which are active or inactive as a whole, and the units into groups.

    Every group of a weight has the same number of active units.
    """

    # Whether the mask depends on the counts only, so that no algorithm can choose it.
    fixed: ClassVar[bool] = False

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

    # Choosing units. A score has one number for each weight; the score of a unit is their sum.

    def largest(self, score: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        """Flat indices of the units with the largest scores, the same number in every group.

        Args:
            score: One number for each weight, as a vector.
            count: Number of weights to choose, as `whole` gives it.
            shape: Shape of the weight.
        """
        return self._indices(self._largest(score, count, shape), shape)

    def largest_mask(self, score: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        """Boolean mask of the weights that `largest` returns, in the shape of the weight, made on the device."""
        index = self.arrange(torch.arange(math.prod(shape), device=score.device).view(tuple(shape)))
        chosen = self._largest(score, count, shape).unsqueeze(-1).expand(index.shape)
        return (
            torch.empty_like(score, dtype=torch.bool).scatter_(0, index.reshape(-1), chosen.reshape(-1)).view(shape)
        )

    def _largest(self, score: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        """Mask of the units of each group with the largest scores."""
        scores = self._score(score, shape)
        chosen = scores.topk(count // (scores.shape[0] * self.extent(shape)[2]), dim=1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)

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
        rank = ranks(self._score(drop, shape).masked_fill(~on, torch.inf))
        most = have - lost if regrow else min(have - lost, units - have)  # exchanged in one group
        pruned = on & (rank < lost)
        candidates = on & (rank >= lost) & (rank < lost + most)
        exchanged = min(round(swap / elements), groups * most)
        lowest = highest(-self._score(drop, shape).masked_fill(~candidates, torch.inf).flatten(), exchanged)
        swapped = torch.zeros_like(on).view(-1).index_fill_(0, lowest, True).view_as(on)
        free = ~(on & ~(pruned | swapped)) if regrow else ~on
        order = ranks(-self._score(grow, shape).masked_fill(~free, -torch.inf))
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
            fitting = (math.gcd(shape[0], self.outputs), math.gcd(shape[1], self.inputs))
            hint = f"; {fitting[0]}x{fitting[1]} would fit" if math.prod(fitting) > 1 else ""
            return f"{shape[0]} outputs and {shape[1]} inputs do not divide into blocks of {self}{hint}"
        return None

    def arrange(self, tensor: Tensor) -> Tensor:
        outputs, inputs = tensor.shape[:2]
        parts = tensor.reshape(outputs // self.outputs, self.outputs, inputs // self.inputs, self.inputs, -1)
        return parts.permute(0, 2, 4, 1, 3).reshape(1, -1, self.outputs * self.inputs)


@dataclass(frozen=True)
class Butterfly(Block):
    """The flat block butterfly, a fixed mask of blocks such as 16x16, for `static` only (Chen et al. 2021).

    Block (i, j) is active if i = j or i xor j = 2^k for one of the k = 0, 1, ... that the count of the weight reaches:
    a weight of n x n blocks has n·(1 + strides) active blocks with at most log2(n) strides, the shortest first. If a
    weight has more blocks in one dimension, i and j are those modulo the smaller number. All positions of a kernel
    have the same mask.

    Args:
        outputs: Outputs of a block.
        inputs: Inputs of a block.
    """

    fixed: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"butterfly {super().__str__()}"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        if why := Block(self.outputs, self.inputs).obstacle(shape):
            return why
        blocks = self._blocks(shape)
        return f"{blocks} blocks are no power of two" if blocks & (blocks - 1) else None

    def _blocks(self, shape: Sequence[int]) -> int:
        """Number of blocks in the dimension that has fewer."""
        return min(shape[0] // self.outputs, shape[1] // self.inputs)

    def arrange(self, tensor: Tensor) -> Tensor:
        """One group; unit x holds the blocks with i xor j = x."""
        rows, columns = tensor.shape[0] // self.outputs, tensor.shape[1] // self.inputs
        parts, blocks = tensor.reshape(rows, self.outputs, columns, self.inputs, -1), min(rows, columns)
        i, j = torch.arange(rows, device=tensor.device), torch.arange(columns, device=tensor.device)
        order = ((i % blocks)[:, None] ^ (j % blocks)).flatten().argsort(stable=True)
        return parts.permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)[order].reshape(1, blocks, -1)

    def extent(self, shape: Sequence[int]) -> tuple[int, int, int]:
        blocks = self._blocks(shape)
        return 1, blocks, math.prod(shape) // blocks

    def whole(self, count: int, shape: Sequence[int]) -> int:
        _, blocks, elements = self.extent(shape)
        return min(super().whole(count, shape), elements * len(_strides(blocks)))

    def _largest(self, score: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        _, blocks, elements = self.extent(shape)
        chosen = torch.zeros(1, blocks, dtype=torch.bool, device=score.device)
        chosen[0, _strides(blocks)[: count // elements]] = True
        return chosen


def _strides(blocks: int) -> list[int]:
    """0 and the powers of two below a power of two."""
    return [0, *(2**k for k in range(blocks.bit_length() - 1))]


@dataclass(frozen=True)
class FanIn(Pattern):
    """The same number of active weights for every output (constant fan-in; Lasby et al. 2024)."""

    def __str__(self) -> str:
        return "fan_in"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        return None

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0], -1, 1)


@dataclass(frozen=True)
class Transposable(NM):
    """n:m along the inputs and along the outputs, so that the transposed weight is n:m too (Hubara et al. 2021).

    A tile of m outputs x m inputs has n active weights in every row and in every column. Such a mask is a union of n
    perfect matchings of rows and columns, so a tile always gains or loses a whole matching: the one with the smallest
    sum of scores is dropped, the one with the largest is grown. The initial mask of a pruned model is the best one for
    m = 4. For larger m it drops m - n smallest matchings one by one, which keeps at least n/m of the sum.
    """

    def __str__(self) -> str:
        return f"transposable {self.n}:{self.m}"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        return Block(self.m, self.m).obstacle(shape)

    def arrange(self, tensor: Tensor) -> Tensor:
        return Block(self.m, self.m).arrange(tensor).reshape(-1, self.m * self.m, 1)

    def extent(self, shape: Sequence[int]) -> tuple[int, int, int]:
        return math.prod(shape) // self.m**2, self.m, self.m  # a unit is a matching

    def _largest(self, score: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        tiles = self._score(score, shape).view(-1, self.m, self.m)
        on = torch.ones_like(tiles, dtype=torch.bool)
        each = count // (len(tiles) * self.m)
        if self.m <= ENUMERATED:
            masks = _regular_masks(self.m, each).to(tiles.device)
            on = masks[(tiles.flatten(1) @ masks.flatten(1).to(tiles.dtype).T).argmax(1)]
        else:
            for _ in range(self.m - each):
                on = on & ~_lightest_matching(tiles, on)
        return on.flatten(1)

    def exchange(
        self, drop: Tensor, grow: Tensor, active: Tensor, prune: int, swap: int, regrow: bool
    ) -> tuple[Tensor, Tensor]:
        shape, m = active.shape, self.m
        drop, grow = (self._score(score, shape).view(-1, m, m) for score in (drop, grow))
        before = self.arrange(active).view(-1, m, m)
        on = before
        for _ in range(prune // (len(on) * m)):
            on = on & ~_lightest_matching(drop, on)
        have = int(on[0, 0].sum())
        possible = have > 0 and (regrow or int(before[0, 0].sum()) < m)
        worst = _lightest_matching(drop, on) if possible else torch.zeros_like(on)
        tiles = (
            (drop * worst).sum((1, 2)).topk(min(round(swap / m), len(on) if possible else 0), largest=False).indices
        )
        swapped = torch.zeros_like(on).index_copy_(0, tiles, worst[tiles])
        grown = torch.zeros_like(on)
        if len(tiles):
            free = ~(on & ~swapped if regrow else before)[tiles]
            grown[tiles] = _lightest_matching(-grow[tiles], free)
        left = on & ~swapped
        return self._indices((before & ~left).flatten(1), shape), self._indices(grown.flatten(1), shape)


ENUMERATED = 4  # sizes of tiles up to which all matchings are compared at once

PATTERNS: Catalogue[type[Pattern]] = Catalogue(
    "pattern", {"n:m": NM, "transposable n:m": Transposable, "block": Block, "butterfly": Butterfly, "fan_in": FanIn}
)


EXPECTED = 'expected "2:4", "transposable 2:4", a block such as "16x1", "butterfly 16x16" or "fan_in"'


def parse_pattern(text: str) -> Pattern | None:
    """Return the pattern of a text such as `2:4`, `16x1`, `butterfly 16x16` or `fan_in`; `None` for an empty text.

    Raises:
        UserError: If there is no such pattern.
    """
    if not text:
        return None
    if not isinstance(text, str):
        raise UserError(f"pattern={shown(text)}: {EXPECTED}")
    if text == "fan_in":
        return FanIn()
    forms = (
        (r"(\d+):(\d+)", NM),
        (r"transposable (\d+):(\d+)", Transposable),
        (r"(\d+)x(\d+)", Block),
        (r"butterfly (\d+)x(\d+)", Butterfly),
    )
    for form, kind in forms:
        if found := re.fullmatch(form, text):
            return kind(int(found[1]), int(found[2]))
    raise UserError(f'pattern="{text}": {EXPECTED}')


def _lightest_matching(weight: Tensor, allowed: Tensor) -> Tensor:
    """Mask of one element in every row and column of each tile, all allowed, with the smallest sum of weights.

    Args:
        weight: Tiles of m x m weights.
        allowed: Mask in which every row and column of a tile has the same positive number of elements.
    """
    m = weight.shape[1]
    cost = weight.masked_fill(~allowed, torch.inf)
    if m <= ENUMERATED:
        masks = _regular_masks(m, 1).to(weight.device)
        sums = torch.stack([cost[:, mask].sum(1) for mask in masks], dim=1)
        return masks[sums.argmin(1)]
    from scipy.optimize import linear_sum_assignment  # here, because `import equipoise` does not need scipy

    tiles = cost.double().cpu().numpy()
    columns = torch.tensor(np.stack([linear_sum_assignment(tile)[1] for tile in tiles])).to(weight.device)
    return torch.zeros_like(allowed).scatter_(2, columns.unsqueeze(2), True)


@cache
def _regular_masks(m: int, n: int) -> Tensor:
    """All masks of m x m elements with n in every row and column."""
    rows = [torch.tensor([column in chosen for column in range(m)]) for chosen in combinations(range(m), n)]
    masks = [torch.stack(choice) for choice in product(rows, repeat=m)]
    return torch.stack([mask for mask in masks if bool((mask.sum(0) == n).all())])


def ranks(score: Tensor) -> Tensor:
    """Rank of each number in its row, from the lowest; equal numbers in their order."""
    order = score.argsort(dim=1, stable=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(score.shape[1], device=score.device).expand_as(order)
    )
