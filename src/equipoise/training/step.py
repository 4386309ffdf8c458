"""One training step, written once for every engine, storage, objective, correction, topology and optimizer."""

from __future__ import annotations

from collections.abc import Callable
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
from equipoise.training.passes import Outcome, Passes
from equipoise.training.run_batches import BatchRef, RefreshBatches, RunBatches


class Step:
    """Takes the steps of a run.

    A step is: gradients of the loss, corrected if the correction says so; clipping; the optimizer; masks and, at
    update steps, drop and grow; the weight average; metrics. `_take` is that sequence. `_update` and `_plain_step`
    launch work on the device only, so that an engine can replay them; counters of the host change in `__call__`.

    Args:
        model: The model.
        optimizer: Its optimizer.
        topology: Its topology, attached without hooks.
        correction: Its gradient correction.
        ema: Its weight average, if any.
        loader: The training images.
        batches: Makes the batches.
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
        batches: RunBatches,
        passes: Passes,
        meter: Meter,
        engine: Engine,
        clip: float = 0.0,
    ) -> None:
        self._model, self._optimizer, self._topology, self._correction = model, optimizer, topology, correction
        self._ema, self._loader, self._batches, self._passes = ema, loader, batches, passes
        self._meter, self._engine, self._clip = meter, engine, clip
        first = next(model.parameters())
        self._on_cpu = first.device.type == "cpu"
        self._loss = torch.zeros((), dtype=first.dtype, device=first.device)
        if topology.rewiring is not None:
            engine.register(topology.rewiring.generator)

    def __call__(self, number: int, learning_rate: float) -> int:
        """Take step `number` of the run, counted from 0; return its number of images, over all processes."""
        ref = self._begin(number, learning_rate)
        if self._is_plain:
            size, differentiate = self._passes.begin(ref)
            key = ("step", *self._batches.kind(ref, size), self._topology.rewires_next)
            self._engine.run(key, partial(self._plain_step, differentiate))
            self._correction.count_step(passes=1)
        else:
            self._take(ref)
        self._topology.count_step()
        self._engine.count_step()
        return self._loader.order.size(ref.epoch, ref.batch)

    @property
    def _is_plain(self) -> bool:
        """Whether a recording engine can run the next step at once: no correction, topology update or clipping.

        Several processes that communicate over gloo average the gradients between two recorded parts.
        """
        topology = self._topology
        special = self._correction.corrects_next_step or topology.update_is_next or topology.growth.recorded
        return self._engine.captures and topology.world.capturable and not special and not self._clip

    def _plain_step(self, differentiate: Callable[[], Outcome]) -> None:
        outcome = differentiate()
        (mean,) = self._correction.runner.all_reduce_mean(outcome.loss)
        self._update(outcome._replace(loss=mean))

    def _take(self, ref: BatchRef) -> None:
        size = self._batches.prepare(ref)  # now: an attack uses the live weights, not the snapshot
        index = self._loader.index(ref.epoch, ref.batch) if self._correction.estimator.fixed_batches else None
        loss = self._correction.backward(self._passes.loss, ref, index=index)
        self._loss.copy_(loss)
        if self._on_cpu:  # on a GPU this would wait for the device: losses are checked every few steps
            check_loss(loss, self._model, self._batches.of(ref, size)[0], ref.epoch, ref.batch)
        if self._clip:
            gradient_of = self._passes.gradient_of
            clip_gradients(self._optimizer, self._model, self._clip, ref.epoch, ref.batch, gradient_of)
        self._topology.before_step()
        key = None if self._topology.update_is_next else ("update", ref.attacked, size, self._topology.rewires_next)
        self._engine.run(key, partial(self._update, Outcome(self._loss, *self._passes.outcome(ref, size))))
        self._passes.clear_gradients()

    def _update(self, outcome: Outcome) -> None:
        self._optimizer.step()
        self._topology.after_step()
        if self._ema is not None:
            self._ema.blend()
        self._meter.add(*outcome)

    def _begin(self, number: int, learning_rate: float) -> BatchRef:
        """Set the numbers of the next step, which replayed work reads from the device."""
        epoch, batch = divmod(number, len(self._loader))
        set_learning_rate(self._optimizer, learning_rate)
        self._batches.begin_step(number)
        if self._ema is not None:
            self._ema.begin_step(number)
        return BatchRef(epoch, batch, self._batches.attacks_steps)

    def refresh(self, number: int, total: int) -> None:
        """Renew the correction's snapshot before step `number` of `total`."""
        estimator = self._correction.estimator
        per_epoch = len(self._loader)
        epoch = number // per_epoch
        first, count = epoch * per_epoch, per_epoch
        if estimator.mode == "replay":
            first, count = number, min(estimator.every or per_epoch, total - number)
        self._batches.begin_step(number)
        refs = RefreshBatches(self._batches, per_epoch, first, count)
        self._correction.refresh(refs, self._passes.loss, epoch)
