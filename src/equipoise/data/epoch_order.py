"""Which images make up which batch of which epoch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from equipoise.data.checks import require_whole
from equipoise.errors import UserError
from equipoise.seeds import generator


@dataclass(frozen=True, eq=False)
class Plan:
    """An epoch: the numbers of its images in order, cut into batches at `bounds`.

    Of each batch, `part` is the share of process `rank` of `ranks`: every so-many-th image, so that the halves of a
    batch are shared out, too.
    """

    images: Tensor
    bounds: list[int]
    rank: int = 0
    ranks: int = 1

    def part(self, i: int) -> slice:
        """Where batch i lies in `images`."""
        return slice(self.bounds[i] + self.rank, self.bounds[i + 1], self.ranks)


@dataclass(frozen=True)
class Order:
    """The order of `count` images in every epoch, as a function of the seed and the epoch alone.

    With `fixed_batches` the composition of each batch is drawn once and only the order of the batches
    changes, as estimators with a memory per batch (SAGA) need; a shorter last batch is then one of those
    that change place, and `drop_last` drops the same images in every epoch.
    rank, ranks: of several processes each takes its share of every batch.
    """

    count: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    fixed_batches: bool = False
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        require_whole("batch", self.batch, 1)
        if len(self) == 0:
            raise UserError(f"{self.count} images do not fill one batch of {self.batch}")
        if self.smallest < self.ranks:
            advice = "fewer processes, or larger batches" if self.batch < self.ranks else "set data.drop_last=true"
            raise UserError(f"{self.ranks} processes cannot share a batch of {self.smallest}: {advice}")

    def __len__(self) -> int:
        full, rest = divmod(self.count, self.batch)
        return full + (rest > 0 and not self.drop_last)

    @property
    def smallest(self) -> int:
        """Images of the smallest batch, of all processes together."""
        return self._images_of(len(self) - 1)

    def size(self, epoch: int, i: int) -> int:
        """Images of batch i of an epoch, of all processes together."""
        return self._images_of(self._batches(epoch)[i] if self.fixed_batches else i)

    def _images_of(self, number: int) -> int:
        """Of a batch as numbered before batches change place: the last one may be short."""
        return min(self.batch, self.count - number * self.batch)

    def plan(self, epoch: int) -> Plan:
        """The batches of an epoch."""
        images = self._permutation(self.count, "images", 0 if self.fixed_batches else epoch)
        chunks = images.split(self.batch)[: len(self)]
        if self.fixed_batches:
            chunks = tuple(chunks[batch] for batch in self._batches(epoch))
        bounds = list(accumulate(map(len, chunks), initial=0))
        return Plan(torch.cat(chunks), bounds, self.rank, self.ranks)

    def index(self, epoch: int, i: int) -> int:
        """Which of the fixed batches is batch i of an epoch."""
        if not self.fixed_batches:
            raise UserError("batches have no lasting number; they do with fixed_batches=True")
        self.check(i)
        return self._batches(epoch)[i]

    def check(self, i: int, extra: int = 0) -> None:
        """Raise unless an epoch has a batch i (or `extra` more)."""
        require_whole("batch number", i, 0)
        if i >= len(self) + extra:
            raise UserError(f"an epoch has no batch {i}; it has {len(self)}, counted from 0")

    def _batches(self, epoch: int) -> list[int]:
        return self._permutation(len(self), "batches", epoch).tolist()

    def _permutation(self, count: int, purpose: str, epoch: int) -> Tensor:
        require_whole("epoch", epoch, 0)
        if not self.shuffle:
            return torch.arange(count)
        return torch.randperm(count, generator=generator(self.seed, purpose, epoch))
