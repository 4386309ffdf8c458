"""PyTorch Lightning: sparse training as a callback."""

from __future__ import annotations

import math
from typing import Any

from equipoise.errors import UserError
from equipoise.integrations.attachment import Attachment
from equipoise.topology import Algorithm
from equipoise.world import World

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ModuleNotFoundError:
        raise UserError("PyTorch Lightning is not installed; pip install 'equipoise[lightning]'") from None


class SparseTraining(Attachment, Callback):
    """Makes the model of a `Trainer` sparse from the first step of `fit` to the last.

        trainer = Trainer(max_epochs=90, callbacks=[SparseTraining(eq.RigL(sparsity=0.9))])
        trainer.fit(module, loader)

    Masks, exploration and counters are part of Lightning's checkpoints. `trainer.fit(..., ckpt_path=FILE)` ends with
    the weights of an uninterrupted run if its batches are the same: Lightning does not save the state of random
    number generators. `density` and `exploration` are logged after every epoch.

    Args:
        algorithm: The topology, such as `eq.RigL(sparsity=0.9)`.
        total_steps: Number of optimizer steps of the whole training; by default `trainer.estimated_stepping_batches`.

    Attributes:
        topology: The topology of the current or last `fit`; `None` before the first.
    """

    def __init__(self, algorithm: Algorithm, *, total_steps: int | None = None) -> None:
        super().__init__(algorithm, total_steps=total_steps)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise UserError(
                "the checkpoint was saved without SparseTraining, so its masks are unknown; "
                "to start from its weights, load them into the module and call fit without ckpt_path"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise UserError(
                f"SparseTraining follows one optimizer and configure_optimizers returns {len(trainer.optimizers)}; "
                "attach one topology to each in on_train_start instead"
            )
        assert trainer.model is not None
        self.attach(trainer.model, trainer.optimizers[0], _total_steps(trainer), World.of(trainer.model))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict(self.metrics(), sync_dist=trainer.world_size > 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.detach()


def _total_steps(trainer: Trainer) -> int | None:
    """The number of optimizer steps of the whole training; `None` if it has no known end."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) else None
