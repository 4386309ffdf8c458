"""Batches of a dataset that lives on the device, with epochs that can be asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.data.augment import Augment, Moves, move
from equipoise.data.checks import require_whole
from equipoise.data.dataset import Images
from equipoise.data.epoch_order import Order, Plan

KEPT_EPOCHS = 2  # the current epoch, and another one that is replayed or looked ahead to


@dataclass(frozen=True, eq=False)
class Epoch:
    """All that is random about an epoch, on the device: row n of `moves` belongs to the n-th image of the plan."""

    plan: Plan
    images: Tensor
    moves: Moves | None


class Loader:
    """Batches `(x, y)`: x float32 in [0, 1] (models normalise inside), y int64, both on `device`.

    Epoch k holds the same batches with the same augmentation every time it is asked for, on any device,
    in any order and after any restart: all that is random about it is drawn from (seed, purpose, k), so a
    run's data position is the pair (epoch, batch). The images stay on the device as uint8 and are
    augmented there; a batch needs no copy from the host and no synchronisation with it.
    Process `rank` of `ranks` gets its share of every batch, with the augmentation that one process would give it.
    """

    def __init__(
        self,
        images: Images,
        batch: int = 128,
        seed: int = 0,
        augment: Augment | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        fixed_batches: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.order = Order(len(images), batch, seed, shuffle, drop_last, fixed_batches, rank, ranks)
        self.images = images.to(device)
        self.augment = augment
        self._epochs: dict[int, Epoch] = {}

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.order)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, from batch `start` on."""
        self.order.check(start, extra=1)
        drawn = self.drawn(epoch)
        return (self._batch(drawn, i) for i in range(start, len(self)))

    def batch(self, epoch: int, i: int) -> tuple[Tensor, Tensor]:
        """Batch i of an epoch, bit-equal to the one that `epoch` gives."""
        self.order.check(i)
        return self._batch(self.drawn(epoch), i)

    def index(self, epoch: int, i: int) -> int:
        """Which of the fixed batches is batch i of an epoch."""
        return self.order.index(epoch, i)

    def _batch(self, drawn: Epoch, i: int) -> tuple[Tensor, Tensor]:
        part = drawn.plan.part(i)
        chosen = drawn.images[part]
        x = self.images.images.index_select(0, chosen)
        if self.augment is not None and drawn.moves is not None:
            x = move(x, Moves(*(each[part] for each in drawn.moves)), reflect=self.augment.reflect)
        return unit(x), self.images.labels.index_select(0, chosen)

    def drawn(self, epoch: int) -> Epoch:
        """All that is random about an epoch."""
        require_whole("epoch", epoch, 0)  # before the look-up: to a dict, True and 1.0 are 1
        if epoch not in self._epochs:
            drawn = self._draw(epoch)
            while len(self._epochs) >= KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]  # the one drawn longest ago
            self._epochs[epoch] = drawn
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> Epoch:
        plan = self.order.plan(epoch)
        device = self.images.images.device
        moves = None
        if self.augment is not None:
            height, width = self.images.images.shape[-2:]
            drawn = self.augment.draw(len(self.images), height, width, self.order.seed, epoch)
            moves = Moves(*(each[plan.images].to(device) for each in drawn))
        return Epoch(plan, plan.images.to(device), moves)


def unit(images: Tensor) -> Tensor:
    """uint8 pixels as float32 in [0, 1]."""
    # Not div_(255): CUDA turns that into this product and the CPU does not, so they would differ in the last bit.
    return images.to(torch.float32).mul_(1 / 255)
