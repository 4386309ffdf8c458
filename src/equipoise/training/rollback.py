"""Return to the last checkpoint with a smaller learning rate after a loss or gradient that is not finite."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.errors import NonFiniteLoss, UserError

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class RollbackOptions:
    """Options for a loss or gradient that is not finite.

    Args:
        times: Number of times that a run may return to its last checkpoint; 0 stops the run with an error.
        factor: Factor of the learning rate for the rest of the run, applied at each rollback.
    """

    times: int = 0
    factor: float = 0.5

    def __post_init__(self) -> None:
        if self.times < 0:
            raise UserError(f"times={self.times}: the number of rollbacks must not be negative; 0 disables them")
        if not 0 < self.factor < 1:
            raise UserError(f"factor={self.factor}: the learning-rate factor must be between 0 and 1, such as 0.5")


def begin(trainer: Trainer) -> None:
    """Write a first checkpoint if the run may roll back and has none."""
    if trainer.recipe.rollback.times:
        folder = trainer.folder
        if trainer.world.broadcast_object(folder is not None and not folder.store.paths()):
            trainer.save()


def roll_back(trainer: Trainer, error: NonFiniteLoss) -> None:
    """Restore the newest valid checkpoint, or raise `error` if the recipe does not allow it or there is none.

    A run that is killed after a rollback and resumed fails at the same step, and rolls back as well.
    """
    options, folder, done = trainer.recipe.rollback, trainer.folder, trainer.rollbacks
    state = folder.store.newest() if folder is not None and done < options.times else None
    state = trainer.world.broadcast_object(state)
    if state is None:
        raise error
    trainer.load_state_dict(state)
    trainer.rollbacks = done + 1
    if folder is not None:
        folder.forget_after(trainer.epoch)
        trainer.history = folder.metrics()
    reason = str(error).partition(";")[0]
    warnings.warn(f"{reason}; back to step {trainer.step} at {options.factor:g} x the learning rate", stacklevel=2)
    trainer.watcher.end()
    trainer.watcher.begin(trainer)
