"""The batches that a refresh of the correction looks at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.training.parts import autocast
from equipoise.training.processes import weighed

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


class Coming:
    """Batches for a refresh, prepared like those of a step: they can be counted before they are run.

    They are those of the steps `first`, `first + 1`, ..., on into the next epoch where there are as many.
    """

    def __init__(self, trainer: Trainer, first: int, count: int) -> None:
        self._trainer, self._first, self._count = trainer, first, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        trainer = self._trainer
        for i, (x, y) in enumerate(islice(self._batches(), self._count)):
            place = divmod(self._first + i, len(trainer.parts.train))
            if trainer.full_pass_is_clean:
                yield weighed(trainer.world, (x, y), trainer.parts.train.order.size(*place))
            else:
                generator = trainer.attack_generator(*place, "refresh", i)
                with autocast(trainer.recipe, trainer.parts.device):
                    batch = trainer.recipe.objective.prepare(trainer.parts.model, x, y, generator)
                yield weighed(trainer.world, batch, trainer.parts.train.order.size(*place))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        loader = self._trainer.parts.train
        epoch, start = divmod(self._first, len(loader))
        while True:
            yield from loader.epoch(epoch, start)
            epoch, start = epoch + 1, 0
