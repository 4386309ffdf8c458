"""PyTorch Lightning: sparse training as a callback."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise.correction.estimator import Estimator
from equipoise.errors import UserError
from equipoise.integrations.attachment import Attachment
from equipoise.topology import Algorithm
from equipoise.world import World

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import CombinedLoader
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.utilities import CombinedLoader
    except ModuleNotFoundError:
        raise ModuleNotFoundError("PyTorch Lightning is not installed; pip install 'equipoise[lightning]'") from None

Loss = Callable[[Any, Any, int], Tensor]  # (module, batch, batch_idx) -> mean loss of the batch


class SparseTraining(Attachment, Callback):
    """Makes the model of a `Trainer` sparse from the first step of `fit` to the last.

        trainer = Trainer(max_epochs=90, callbacks=[SparseTraining(eq.RigL(sparsity=0.9), eq.Agent())])
        trainer.fit(module, loader)

    All state is part of Lightning's checkpoints, including the random number generators, which Lightning does not
    save. `trainer.fit(..., ckpt_path=FILE)` ends with the weights of an uninterrupted run if the checkpoint was saved
    at the end of an epoch; inside an epoch Lightning needs a loader with `state_dict`. `density`, `exploration` and
    numbers of the correction are logged after every epoch.

    A correction with `mode="replay"` reads the batches of an epoch ahead. The loader must give them in the same order
    twice: shuffle by a sampler with `set_epoch` such as `DistributedSampler`, not by `shuffle=True`.

    A correction runs `training_step` also at old weights and, at the start of an epoch, on all batches. What
    `training_step` logs there is dropped. If it changes anything else, such as metrics, give a `loss_fn` that does
    not.

    Args:
        algorithm: The topology, such as `eq.RigL(sparsity=0.9)`.
        correction: The gradient correction, such as `eq.Agent()`; by default none.
        total_steps: Number of optimizer steps of the whole training; by default `trainer.estimated_stepping_batches`.
        loss_fn: Maps the module, a batch and its number to the loss, for the correction; by default `training_step`.

    Attributes:
        topology: The topology of the current or last `fit`; `None` before the first.
        correction: The attached correction; `None` if there is none.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        correction: Estimator | None = None,
        *,
        total_steps: int | None = None,
        loss_fn: Loss | None = None,
    ) -> None:
        super().__init__(algorithm, correction, total_steps=total_steps)
        self._loss_fn = loss_fn or _training_step
        self._batch: tuple[Any, int] | None = None  # of the current step
        self._scaled_loss: Tensor | None = None  # by accumulation and by a GradScaler

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
                "attach one topology to each optimizer in on_train_start instead"
            )
        model, steps, loaded = trainer.model, trainer.estimated_stepping_batches, self._loaded
        planned = int(steps) if math.isfinite(steps) else None
        self.attach(model, trainer.optimizers[0], planned, World.of(model), trainer.accumulate_grad_batches)
        if loaded is not None and len(loaded["random"]) == trainer.world_size:
            _restore_random(loaded["random"][trainer.global_rank])
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.num_training_batches == 0:
                # The next epoch draws its order. Lightning has drawn it before, from another random state.
                iter(trainer.fit_loop._data_fetcher)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._batch = batch, batch_idx
        self.before_batch(trainer.current_epoch, _Batches(trainer), self._loss(trainer, pl_module))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._scaled_loss = loss.detach()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.correction is not None and self._batch is not None and self._scaled_loss is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = (1.0 if scaler is None else scaler.get_scale()) / trainer.accumulate_grad_batches
            loss_fn, loss = self._loss(trainer, pl_module), self._scaled_loss / scale
            self.correction.correct(loss_fn, *self._batch, scale=scale, loss=loss)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict(self.metrics(), sync_dist=trainer.world_size > 1)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.topology is not None:
            state["random"] = self.topology.world.gather_object(_random_state())
        return state

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batch = self._scaled_loss = None
        self.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _loss(self, trainer: Trainer, module: LightningModule) -> Callable[..., Tensor]:
        """Return the loss in the precision of the trainer. It calls the module, not its distributed wrapper."""

        def loss(_: nn.Module, batch: Any, batch_idx: int) -> Tensor:
            with trainer.precision_plugin.train_step_context(), _silent(module):
                return self._loss_fn(module, batch, batch_idx)

        return loss


class _Batches:
    """The training batches of an epoch as `training_step` gets them, with their numbers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __length_hint__(self) -> int:
        count = self._trainer.num_training_batches
        return int(count) if math.isfinite(count) else NotImplemented

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        trainer = self._trainer
        loaders = CombinedLoader(trainer.train_dataloader, "max_size_cycle")
        loaders.flattened = [_second(loader) for loader in loaders.flattened]
        count = trainer.num_training_batches
        for batch, batch_idx, _ in islice(loaders, int(count) if math.isfinite(count) else None):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            yield trainer.strategy.batch_to_device(batch, dataloader_idx=0), batch_idx


def _second(loader: Any) -> Any:
    """Return a loader of the same batches: the first one is in use, and its position and workers stay as they are."""
    loader = copy.copy(loader)
    if isinstance(loader, DataLoader):
        loader._iterator = None
    return loader


def _training_step(module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    numbered = "batch_idx" in inspect.signature(module.training_step).parameters
    output = module.training_step(batch, batch_idx) if numbered else module.training_step(batch)
    return output["loss"] if isinstance(output, Mapping) else output


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """Drop what the module logs: it is not of a step of the training."""
    module.log = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log


def _random_state() -> dict[str, Any]:
    """Return the state of the global random number generators in types that `torch.load` reads without running code."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], *rest),
    }


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
