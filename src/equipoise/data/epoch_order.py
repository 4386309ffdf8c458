"""Which images make up which batch of which epoch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.seeds import generator


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """This process's share of one epoch: image indices in order, split into batches at `bounds`."""

    images: Tensor
    bounds: list[int]

    def part(self, i: int) -> slice:
        """Slice of `images` that is batch i."""
        return slice(self.bounds[i], self.bounds[i + 1])


@dataclass(frozen=True)
class Order:
    """Order of the images in every epoch, a function of the seed and the epoch alone.

    `count` is the number of images; the other arguments are the same as for `Loader`. With `fixed_batches`, the shorter
    last batch is permuted too, and `drop_last` drops the same images in every epoch.
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
        require_whole(batch=self.batch)
        if len(self) == 0:
            raise UserError(f"{self.count} images do not fill one batch of {self.batch}")
        smallest = self._images_of(len(self) - 1)
        if smallest < self.ranks:
            advice = "fewer processes, or larger batches" if self.batch < self.ranks else "set data.drop_last=true"
            raise UserError(f"{self.ranks} processes cannot share a batch of {smallest}: {advice}")

    def __len__(self) -> int:
        full, rest = divmod(self.count, self.batch)
        return full + (rest > 0 and not self.drop_last)

    def size(self, epoch: int, i: int) -> int:
        """Number of images in batch i of an epoch, summed over the processes."""
        return self._images_of(self._batches(epoch)[i] if self.fixed_batches else i)

    def plan(self, epoch: int) -> EpochPlan:
        """This process's share of every batch of an epoch."""
        images = self._permutation(self.count, "images", 0 if self.fixed_batches else epoch)
        chunks = images.split(self.batch)[: len(self)]
        if self.fixed_batches:
            chunks = tuple(chunks[batch] for batch in self._batches(epoch))
        # Strided, so that every share has images of both halves; the mixed objective attacks only the second half.
        shares = [chunk[self.rank :: self.ranks] for chunk in chunks]
        return EpochPlan(torch.cat(shares), list(accumulate(map(len, shares), initial=0)))

    def index(self, epoch: int, i: int) -> int:
        """Index, constant over epochs, of the fixed batch that is batch i of an epoch."""
        if not self.fixed_batches:
            raise UserError("batches have no constant index; set fixed_batches=True")
        self.check(i)
        return self._batches(epoch)[i]

    def check(self, i: int, extra: int = 0) -> None:
        """Raise unless i is below the number of batches plus `extra`."""
        require_whole(least=0, batch_index=i)
        if i >= len(self) + extra:
            raise UserError(f"an epoch has no batch {i}; it has {len(self)} batches, counted from 0")

    def _images_of(self, batch: int) -> int:
        """Size of a batch by its index before batches are permuted: the last one may be smaller."""
        return min(self.batch, self.count - batch * self.batch)

    def _batches(self, epoch: int) -> list[int]:
        return self._permutation(len(self), "batches", epoch).tolist()

    def _permutation(self, count: int, purpose: str, epoch: int) -> Tensor:
        require_whole(least=0, epoch=epoch)
        if not self.shuffle:
            return torch.arange(count)
        return torch.randperm(count, generator=generator(self.seed, purpose, epoch))
