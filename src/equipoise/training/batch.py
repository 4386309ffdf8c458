"""Batches made on the device from where they stand in their epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.data import Loader
from equipoise.data.augment import Moves, move
from equipoise.data.loader import unit


class BatchMaker:
    """The batches of a loader, bit-equal to its own, by work that is the same for each: only `place` differs."""

    def __init__(self, loader: Loader, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._loader = loader
        self.usual = loader.order.batch
        images = loader.images
        device, count = images.images.device, len(images)
        self._order = torch.zeros(count, dtype=torch.int64, device=device)
        self._moves = Moves(self._order.new_zeros(count, 2), torch.zeros(count, dtype=torch.bool, device=device))
        self._start = torch.zeros((), dtype=torch.int64, device=device)
        self._epoch = -1
        self._assemble = assemble
        self._compiled = compiled(assemble)

    def place(self, epoch: int, i: int) -> int:
        """Make batch i of an epoch the next one, and say how large it is."""
        drawn = self._loader.drawn(epoch)
        if epoch != self._epoch:
            self._order[: len(drawn.images)].copy_(drawn.images)
            if drawn.moves is not None:
                for there, moves in zip(self._moves, drawn.moves, strict=True):
                    there[: len(moves)].copy_(moves)
            self._epoch = epoch
        part = drawn.plan.part(i)
        self._start.fill_(part.start)
        return part.stop - part.start

    def __call__(self, size: int) -> tuple[Tensor, Tensor]:
        images, augment = self._loader.images, self._loader.augment
        function = self._compiled if size == self.usual else assemble
        moves = None if augment is None else self._moves
        reflect = augment is not None and augment.reflect
        return function(images.images, images.labels, self._order, moves, self._start, size, reflect)


def assemble(
    images: Tensor, labels: Tensor, order: Tensor, moves: Moves | None, start: Tensor, size: int, reflect: bool
) -> tuple[Tensor, Tensor]:
    """The `size` images from `start` on in this order, moved as drawn for them, and their labels."""
    rows = start + torch.arange(size, device=order.device)
    chosen = order.index_select(0, rows)
    x = images.index_select(0, chosen)
    if moves is not None:
        x = move(x, Moves(*(each.index_select(0, rows) for each in moves)), reflect=reflect)
    return unit(x).contiguous(memory_format=torch.channels_last), labels.index_select(0, chosen)
