"""One training step, written once for every engine, storage, objective, correction, topology and optimizer."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from equipoise.correction import Correction
from equipoise.data import FolderLoader, Loader
from equipoise.topology import Topology
from equipoise.topology.ema import EMA
from equipoise.training.engine import Engine
from equipoise.training.meter import Meter
from equipoise.training.non_finite import check_loss, clip_gradients
from equipoise.training.optimizers import set_learning_rate
from equipoise.training.passes import BatchRef, Passes, RefreshBatches


class Step:
    """Takes the steps of a run.

    A step is: gradients of the loss, corrected if the correction says so; clipping; the optimizer; masks and, at
    update steps, drop and grow; the weight average; metrics. `_update` launches work on the device only, so that the
    engine can replay it; counters of the host change in `__call__`.

    Args:
        model: The model.
        optimizer: Its optimizer.
        topology: Its topology, attached without hooks.
        correction: Its gradient correction.
        ema: Its weight average, if any.
        loader: The training images.
        passes: Runs the model.
        meter: Sums loss and accuracy.
        engine: Runs the update.
        clip: Largest norm of the gradient; 0 for none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        topology: Topology,
        correction: Correction,
        ema: EMA | None,
        loader: Loader | FolderLoader,
        passes: Passes,
        meter: Meter,
        engine: Engine,
        clip: float = 0.0,
    ) -> None:
        self._model, self._optimizer, self._topology, self._correction = model, optimizer, topology, correction
        self._ema, self._loader, self._passes, self._meter = ema, loader, passes, meter
        self._engine, self._clip = engine, clip
        device = next(model.parameters()).device
        self._on_cpu = device.type == "cpu"
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        for generator in topology.generators:
            engine.register(generator)

    def __call__(self, number: int, learning_rate: float) -> int:
        """Take step `number` of the run, counted from 0; return its number of images, over all processes."""
        ref = self._begin(number)
        set_learning_rate(self._optimizer, learning_rate)
        size = self._passes.prepare(ref)  # now: an attack is on the live weights, not on those of the snapshot
        index = self._loader.index(ref.epoch, ref.batch) if self._correction.estimator.fixed_batches else None
        loss = self._correction.backward(self._passes.loss, ref, index=index)
        self._loss.copy_(loss)
        if self._on_cpu:  # a GPU would have to be waited for: its losses are checked every few steps
            check_loss(loss, self._model, self._passes.images(ref, size), ref.epoch, ref.batch)
        if self._clip:
            clip_gradients(self._optimizer, self._model, self._clip, ref.epoch, ref.batch)
        self._topology.before_step()
        if self._ema is not None:
            self._ema.count_step()
        key = None if self._topology.update_is_next else ("update", ref.attacked, size, self._topology.rewires_next)
        self._engine.run(key, partial(self._update, ref, size))
        self._passes.clear_gradients()
        self._topology.count_step()
        self._engine.count_step()
        return self._loader.order.size(ref.epoch, ref.batch)

    def _update(self, ref: BatchRef, size: int) -> None:
        self._optimizer.step()
        self._topology.after_step()
        if self._ema is not None:
            self._ema.blend()
        self._meter.add(self._loss, *self._passes.outcome(ref, size))

    def _begin(self, number: int) -> BatchRef:
        epoch, batch = divmod(number, len(self._loader))
        self._passes.begin_step(number)
        self._meter.begin_batch(batch)
        return BatchRef(epoch, batch, self._passes.attacks_steps)

    def refresh(self, number: int, total: int) -> None:
        """Renew the correction's snapshot before step `number` of `total`."""
        estimator = self._correction.estimator
        batches = len(self._loader)
        epoch = number // batches
        first, count = epoch * batches, batches
        if estimator.mode == "replay":
            first, count = number, min(estimator.every or batches, total - number)
        self._passes.begin_step(number)
        refs = RefreshBatches(self._passes, batches, first, count)
        self._correction.refresh(refs, self._passes.loss, epoch)
