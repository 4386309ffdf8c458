"""The training loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.config import split
from equipoise.correction.snapshot import RandomState
from equipoise.data import Loader
from equipoise.errors import NonFiniteLoss
from equipoise.seeds import derive
from equipoise.topology.attach_checks import warn_without_updates
from equipoise.training import rollback, signals
from equipoise.training.engine import Engine
from equipoise.training.epoch_line import epoch_line
from equipoise.training.evaluate import Score, score, score_three_ways
from equipoise.training.layer_summary import describe_layers
from equipoise.training.meter import Meter, learned_nothing
from equipoise.training.non_finite import check_weights
from equipoise.training.parts import make_parts
from equipoise.training.precision import autocast
from equipoise.training.published import STATISTICS_BATCHES, raw_shifts, shifted
from equipoise.training.recipe import Recipe
from equipoise.training.run_folder import RunFolder, strict
from equipoise.training.run_state import restore, state_of
from equipoise.training.watchers import Watcher
from equipoise.world import ALONE, World

STUCK = (
    "the network learned nothing: its training loss has not fallen since the first epoch. Units of very sparse layers "
    "can become inactive for good: try another learning rate, a lower sparsity or another seed"
)
CHECK_EVERY = 50  # steps between checks of the losses on a GPU, each of which waits for the device


class Trainer:
    """Runs a recipe, writes its folder, and continues from a checkpoint bit for bit.

    Args:
        recipe: The recipe.
        folder: Where to write metrics, checkpoints and the result; nowhere by default.
        watcher: Told about the progress.
        world: The processes that train together (`processes.joined`); the first has the folder and the watcher.
        engine: Runs the steps; chosen from recipe and device by default.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder | None = None,
        watcher: Watcher | None = None,
        world: World = ALONE,
        engine: Engine | None = None,
    ) -> None:
        self.recipe = recipe
        self.world = world
        self.folder = folder
        self.watcher = watcher or Watcher()
        self.epoch = 0
        self.batch = 0
        self.best = -1.0
        self.seconds = 0.0
        self.startup_seconds = 0.0  # of compiling and capturing; not part of `seconds`
        self.images = 0
        self.rollbacks = 0
        self.learning_rate = recipe.optimizer.lr  # of the last step
        self.published: Score | None = None  # as the published code scores the current epoch, after its first step
        self.history: list[dict[str, Any]] = []
        self.parts = make_parts(recipe, world, engine, self._count_startup)
        torch.manual_seed(derive(recipe.seed, "training", *([] if world.alone else [world.rank])))
        self._random = RandomState(self.parts.device)  # earlier draws of the process have no effect on the run

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.epoch * len(self.parts.train) + self.batch

    @property
    def total_steps(self) -> int:
        return self.recipe.epochs * len(self.parts.train)

    @property
    def meter(self) -> Meter:
        """Loss and accuracy of the current epoch."""
        return self.parts.meter

    @property
    def raw(self) -> dict[str, Any]:
        """The recipe with the mode of the correction and the storage that were chosen, as a resumed run needs it.

        The file of pretrained weights is named by its full path.
        """
        raw, estimator = dict(self.recipe.raw), self.parts.correction.estimator
        if estimator.corrects and len(estimator.modes) > 1:
            name, options = split(raw["correction"], "correction")
            raw["correction"] = {"name": name, **options, "mode": estimator.mode}
        if self.parts.topology.layers:
            raw["storage"] = self.parts.topology.storage
        if self.recipe.weights is not None:
            raw["weights"] = str(Path(self.recipe.weights).resolve())
        return raw

    def run(self) -> dict[str, Any]:
        """Train to the end and return the result."""
        if self.folder is None:
            return self._run()
        self.folder.claim()
        try:
            result = self._run()
            self.folder.finish(result)
        finally:
            self.folder.release()
        return result

    def _run(self) -> dict[str, Any]:
        if self.world.leads:
            warn_without_updates(self.parts.topology, stacklevel=2)
        self._random.restore()
        self.watcher.begin(self)
        rollback.begin(self)
        try:
            while self.epoch < self.recipe.epochs:
                try:
                    self.run_epoch()
                except NonFiniteLoss as error:
                    rollback.roll_back(self, error)
        finally:
            self._random = RandomState(self.parts.device)
            self.watcher.end()
        if self.learned_nothing and self.world.leads:
            warnings.warn(STUCK, stacklevel=2)
        return self.result()

    @property
    def learned_nothing(self) -> bool:
        """Whether the training loss has not fallen since the first epoch."""
        return learned_nothing([line["train_loss"] for line in self.history if line.get("train_loss") is not None])

    # One epoch

    def run_epoch(self) -> None:
        """Train to the end of the current epoch, score the model and save a checkpoint."""
        self.parts.model.train()
        started = time.perf_counter()
        while self.batch < len(self.parts.train):
            self.take_step()
            stops = self._stop_is_requested()
            if stops or self._checkpoint_is_due():
                self._count_seconds(started)
                self.save()
                if stops:
                    raise signals.Stopped
                started = time.perf_counter()
        self._check_finite()
        self._count_seconds(started)
        self._finish_epoch()

    def take_step(self) -> None:
        """Take one step of the current epoch, with a refresh of the correction if one is due."""
        try:
            self._take_step()
        except RuntimeError as error:
            # Compiling or capturing may fail in the first steps of a run; later errors are real ones.
            reason = self.parts.engine.give_up(error)
            warnings.warn(f"steps run in eager mode, which is slower: {reason}", stacklevel=2)
            self._take_step()
        self.batch += 1
        if self._on_cpu or self.batch % CHECK_EVERY == 0:
            self.meter.check(self.epoch)
            self.watcher.step(self)

    def _take_step(self) -> None:
        if self._refresh_is_due():
            self._refresh()
        self.learning_rate = self._scheduled_rate()
        if self.batch == 0 and self.recipe.as_published.score:
            self._step_as_published()
        else:
            self.images += self.parts.step(self.step, self.learning_rate)

    def _step_as_published(self) -> None:
        """Take a step, and score the model with the BatchNorm statistics that a pass over raw images leaves before it.

        With `bn_trace` the full pass of the correction has left them.
        """
        parts, published = self.parts, self.recipe.as_published
        assert isinstance(parts.train, Loader)  # which recipes with `as_published` need
        precision = partial(autocast, self.recipe.precision, parts.device)
        raw = (x for x, _ in islice(parts.train.epoch(self.epoch, raw=True), STATISTICS_BATCHES))
        with self._uncounted():
            shifts = [] if published.bn_trace else raw_shifts(parts.model, raw, precision)
        self.images += parts.step(self.step, self.learning_rate)
        with self._uncounted(), shifted(shifts):
            self.published = score(parts.model, parts.loaders[parts.judged_on].epoch(0), precision, self.world)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Leave the block out of the seconds of training."""
        if not self._on_cpu:
            torch.cuda.synchronize()
        before = time.perf_counter()
        yield
        if not self._on_cpu:
            torch.cuda.synchronize()
        self.seconds -= time.perf_counter() - before

    @property
    def _on_cpu(self) -> bool:
        return self.parts.device.type == "cpu"

    def _scheduled_rate(self) -> float:
        recipe = self.recipe
        factor = recipe.schedule.factor(self.step, recipe.epochs, len(self.parts.train))
        factor *= recipe.correction.learning_rate_factor
        return recipe.optimizer.lr * factor * recipe.rollback.factor**self.rollbacks

    def _refresh_is_due(self) -> bool:
        estimator = self.parts.correction.estimator
        return estimator.corrects and (self.step % estimator.every == 0 if estimator.every else self.batch == 0)

    def _refresh(self) -> None:
        try:
            self.parts.step.refresh(self.step, self.total_steps)
        except NonFiniteLoss as error:
            if self.batch:  # at the start of an epoch the weights have just been checked
                check_weights(self.parts.model, self.epoch, self.batch)
            raise NonFiniteLoss(f"epoch {self.epoch + 1}: {error}") from None

    def _count_seconds(self, started: float) -> None:
        """Count seconds of training, without evaluation, checkpoints and the start-up of an engine."""
        if not self._on_cpu:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started

    def _count_startup(self, seconds: float) -> None:
        """Count seconds of start-up, and subtract them from `seconds`, to which `_count_seconds` will add them."""
        self.startup_seconds += seconds
        self.seconds -= seconds

    def _stop_is_requested(self) -> bool:
        """Whether to stop now; all processes stop at the same step, because the flag is averaged with the gradients."""
        if self.world.alone:
            return signals.requested()
        if signals.requested():
            self.world.raise_flag()
        return (self._on_cpu or self.batch % CHECK_EVERY == 0) and self.world.flag

    def _checkpoint_is_due(self) -> bool:
        steps = self.recipe.checkpoint.steps
        return bool(steps) and self.step % steps == 0 and self.batch < len(self.parts.train)

    def _finish_epoch(self) -> None:
        self.parts.topology.check_equal()
        scores = self.evaluate()
        published = {} if self.published is None else {"as_published": self.published}
        line = strict(epoch_line(self, scores | published))
        self.history.append(line)
        accuracy = max(score.accuracy for score in scores.values())
        is_best = self.recipe.checkpoint.best and accuracy > self.best
        self.best = max(accuracy, self.best)
        self.epoch, self.batch = self.epoch + 1, 0
        self.meter.reset()
        if self.folder is not None:
            self.folder.append(line)
        if is_best or self.epoch % self.recipe.checkpoint.every == 0 or self.epoch == self.recipe.epochs:
            self.save(is_best)
        self.watcher.epoch(self, line)

    # Scores

    def evaluate(self, split: str | None = None) -> dict[str, Score]:
        """Score the model three ways: plain, with recalibrated BatchNorm, and with averaged weights."""
        parts = self.parts
        loader = parts.loaders[split or parts.judged_on]
        precision = partial(autocast, self.recipe.precision, parts.device)
        return score_three_ways(
            parts.model, lambda: loader.epoch(0), self.recalibration_images, parts.ema, precision, self.world
        )

    def recalibration_images(self) -> Iterator[Tensor]:
        """The training images that BatchNorm statistics are recalibrated on."""
        return (x for x, _ in islice(self.parts.train.epoch(0), self.recipe.bn_recalibration_batches))

    def result(self) -> dict[str, Any]:
        """Scores on the test images, the best accuracy of an epoch, seconds, and the layers."""
        test = {name: asdict(score) for name, score in self.evaluate("test").items()}
        result = {"version": 1, "epochs": self.epoch, "best": self.best, "test": test, "seconds": self.seconds}
        return dict(strict(result | {"layers": describe_layers(self.parts.topology)}))

    def close(self) -> None:
        """Free the model and everything that belongs to it; the trainer cannot be used afterwards."""
        del self.parts

    # Checkpoints

    def _check_finite(self) -> None:
        """Refuse a loss of the steps so far, or weights after the last step, that are not finite."""
        self.meter.check(self.epoch)
        check_weights(self.parts.model, self.epoch, self.batch)

    def save(self, best: bool = False) -> None:
        """Write a checkpoint."""
        self._check_finite()
        state = None if self.folder is None and self.world.alone else self.state_dict()
        if self.folder is not None and state is not None:
            self.folder.store.save(self.step, state, best)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs. Of several processes, only the first returns the complete state."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.parts.engine.reset()
        self.parts.passes.clear_gradients()  # of a step that failed
        self._random = restore(self, state)


def resume(folder: RunFolder, recipe: Recipe, watcher: Watcher | None = None, world: World = ALONE) -> Trainer:
    """Return a trainer at the newest valid checkpoint of a folder."""
    if world.leads:
        folder.claim()
    trainer = Trainer(recipe, folder if world.leads else None, watcher, world)
    state = world.broadcast_object(folder.store.newest() if world.leads else None)
    if state is not None:
        trainer.load_state_dict(state)
    if world.leads:
        if state is not None:
            folder.store.tidy(trainer.step)  # the process may have been killed before it removed old checkpoints
        folder.forget_after(trainer.epoch)  # the epochs that are repeated
        trainer.history = folder.metrics()
    return trainer
