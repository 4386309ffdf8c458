"""The problem of `framework_helpers` in PyTorch Lightning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise.integrations.lightning import SparseTraining
from framework_helpers import BATCH, EPOCHS, RATE, data, loss_fn, network, quiet, topology

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """A user's module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_fn(self, *batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)]


class StopAfter(pl.Callback):
    """Ends `fit` after some batches."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._left -= 1
        trainer.should_stop = self._left == 0


def fit(
    folder: Path,
    correction: Any = None,
    *,
    module: Module | None = None,
    sparse: SparseTraining | None = None,
    loader: Any = None,
    stop_after: int = 0,
    resume: str | None = None,
    every: int = 1,
    **options: Any,
) -> tuple[Module, SparseTraining, pl.Trainer]:
    """Fit the problem; `last.ckpt` in the folder is the last checkpoint, of a batch or, with `every=0`, of an epoch."""
    module = module or Module(network())
    sparse = sparse or SparseTraining(topology(), correction)
    last = ModelCheckpoint(folder, every_n_train_steps=every, every_n_epochs=1 - every, save_last=True, save_top_k=0)
    stop = [StopAfter(stop_after)] if stop_after else []
    quietly = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with quiet():
        trainer = pl.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", callbacks=[sparse, *stop, last], **quietly, **options
        )
        trainer.fit(module, loader or DataLoader(data(), batch_size=BATCH), ckpt_path=resume)
    return module, sparse, trainer
