"""The training loop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.config import split
from equipoise.correction import NonFiniteLoss
from equipoise.correction.snapshot import Random
from equipoise.objectives import Standard
from equipoise.seeds import derive
from equipoise.training import rollback, signals
from equipoise.training.captured import CapturedStep, obstacle
from equipoise.training.evaluate import Score, score_three_ways
from equipoise.training.layer_summary import describe_layers
from equipoise.training.meter import Meter, learned_nothing
from equipoise.training.non_finite import check_loss, check_weights, clip_gradients
from equipoise.training.parts import autocast, make_parts
from equipoise.training.processes import own_generator, weighed, weighed_loss
from equipoise.training.recipe import Recipe
from equipoise.training.refresh_batches import Coming
from equipoise.training.run_folder import RunFolder, strict
from equipoise.training.run_state import restore, state_of
from equipoise.training.watchers import Watcher
from equipoise.world import ALONE, World

STUCK = (
    "the network learned nothing: its training loss has not fallen since the first epoch. Units of very sparse "
    "layers can fall silent for good: try another learning rate, less sparsity or another seed"
)
CHECK_EVERY = 50  # steps between looks at the losses on a GPU, where each look waits for the device


class Trainer:
    """Runs a recipe, writes its folder, and goes on from where a checkpoint stopped, bit for bit."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder | None = None,
        watcher: Watcher | None = None,
        world: World = ALONE,
    ) -> None:
        """world: the processes that train together (`distributed.joined`); the first has the folder and a watcher."""
        self.recipe = recipe
        self.world = world
        self.folder = folder
        self.watcher = watcher or Watcher()
        self.parts = make_parts(recipe, world)
        self.epoch = 0
        self.batch = 0
        self.best = -1.0
        self.seconds = 0.0
        self.startup_seconds = 0.0  # seconds of compiling and recording steps, which are not among those above
        self.images = 0
        self.attacks = 0  # batches that have been attacked, those of full passes included
        self.rollbacks = 0
        self.meter = Meter(self.parts.device)
        self.history: list[dict[str, Any]] = []
        self.captured: CapturedStep | None = None
        self._may_capture = recipe.engine == "auto" and self.parts.device.type == "cuda"
        torch.manual_seed(derive(recipe.seed, "training", *([] if world.alone else [world.rank])))
        self._random = Random(self.parts.device)  # what others draw before the run does not matter

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.epoch * len(self.parts.train) + self.batch

    @property
    def total_steps(self) -> int:
        return self.recipe.epochs * len(self.parts.train)

    @property
    def raw(self) -> dict[str, Any]:
        """The recipe as a resumed run must find it: with the way of the correction and the storage chosen for it."""
        raw, estimator = dict(self.recipe.raw), self.parts.correction.estimator
        if estimator.corrects and estimator.source == estimator.mode:
            name, options = split(raw["correction"], "correction")
            raw["correction"] = {"name": name, **options, "mode": estimator.mode}
        if self.parts.topology.layers:
            raw["storage"] = self.parts.topology.storage
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
        self._random.restore()
        self.watcher.begin(self)
        rollback.begin(self)
        try:
            while self.epoch < self.recipe.epochs:
                try:
                    self._run_epoch()
                except NonFiniteLoss as error:
                    rollback.roll_back(self, error)
        finally:
            self._random = Random(self.parts.device)
            self.watcher.end()
        if self.learned_nothing and self.world.leads:
            warnings.warn(STUCK, stacklevel=2)
        return self.result()

    @property
    def learned_nothing(self) -> bool:
        """Whether the training loss is where it was after the first epoch, or above."""
        return learned_nothing([line["train_loss"] for line in self.history if line.get("train_loss") is not None])

    # One epoch

    def _run_epoch(self) -> None:
        parts = self.parts
        started = time.perf_counter()
        parts.model.train()
        self._begin_capture()
        for batch in self._batches():
            if self._refresh_is_due():
                self._refresh()
            self.images += self._step(batch)
            self.batch += 1
            if self.parts.device.type == "cpu" or self.batch % CHECK_EVERY == 0:
                self.meter.check(self.epoch)
                self.watcher.step(self)
            stops = self._stop_is_asked()
            if stops or self._checkpoint_is_due():
                self._count_seconds(started)
                self.save()
                if stops:
                    raise signals.Stopped
                started = time.perf_counter()
        self._check_finite()
        self._count_seconds(started)
        self._finish_epoch()

    def _begin_capture(self) -> None:
        """On a GPU steps are compiled and captured, unless the recipe says otherwise or something is in the way."""
        if not self._may_capture or self.captured is not None:
            return
        if reason := obstacle(self):
            self._may_capture = False
            warnings.warn(f"steps run in eager mode, which is slower: {reason}", stacklevel=2)
        else:
            self.captured = CapturedStep(self)

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        """The batches that are left of the epoch; empty ones where the captured step makes its own."""
        if self.captured is None:
            return self.parts.train.epoch(self.epoch, start=self.batch)
        return iter([()] * (len(self.parts.train) - self.batch))

    def _give_up_capture(self, error: RuntimeError) -> None:
        """Go on in eager mode where a first compilation or capture has failed; later errors are real ones."""
        if self.captured is None or self.captured.works:
            raise error
        self.captured.release()
        self.captured, self._may_capture = None, False
        line = " ".join(str(error).split())[:200]
        warnings.warn(f"steps run in eager mode, which is slower: capturing failed with {line}", stacklevel=2)

    def _count_seconds(self, started: float) -> None:
        """Of training alone: neither evaluation nor the writing of checkpoints counts, nor what a start-up takes."""
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started

    def count_startup(self, seconds: float) -> None:
        """They are a part of what `_count_seconds` will count next."""
        self.startup_seconds += seconds
        self.seconds -= seconds

    def _stop_is_asked(self) -> bool:
        """Of several processes all stop at the same step, where the average of gradients has told them."""
        if self.world.alone:
            return signals.requested()
        if signals.requested():
            self.world.raise_flag()
        return (self.parts.device.type == "cpu" or self.batch % CHECK_EVERY == 0) and self.world.flag

    def _checkpoint_is_due(self) -> bool:
        steps = self.recipe.checkpoint.steps
        return bool(steps) and self.step % steps == 0 and self.batch < len(self.parts.train)

    def _refresh_is_due(self) -> bool:
        every = self.parts.correction.estimator.every
        return self.step % every == 0 if every else self.batch == 0

    def _refresh(self) -> None:
        estimator = self.parts.correction.estimator
        if not estimator.corrects:
            return None
        batches = len(self.parts.train)
        first, count = self.epoch * batches, batches
        if estimator.source == "replay":
            first, count = self.step, min(estimator.every or batches, self.total_steps - self.step)
        try:
            if self.captured is not None:
                try:
                    return self.captured.refresh(first, count)
                except RuntimeError as error:
                    self._give_up_capture(error)
            self.parts.correction.refresh(Coming(self, first, count), self._full_loss, self.epoch)
        except NonFiniteLoss as error:
            if self.batch:  # else they were sound at the end of the epoch before
                check_weights(self.parts.model, self.epoch, self.batch)
            raise NonFiniteLoss(f"epoch {self.epoch + 1}: {error}") from None

    def _step(self, batch: tuple[Tensor, ...]) -> int:
        """One optimizer step; how many images it was on."""
        self._set_learning_rate()
        if self.captured is not None:
            try:
                return self.captured.step()
            except RuntimeError as error:
                self._give_up_capture(error)
        x, y = batch or self.parts.train.batch(self.epoch, self.batch)
        self._eager_step(x, y)
        return self.parts.train.order.size(self.epoch, self.batch)

    def _eager_step(self, x: Tensor, y: Tensor) -> None:
        parts, recipe = self.parts, self.recipe
        with autocast(recipe, parts.device):
            batch = recipe.objective.prepare(parts.model, x, y, self.attack_generator(self.epoch, self.batch))
        batch = weighed(self.world, batch, parts.train.order.size(self.epoch, self.batch))
        index = parts.train.index(self.epoch, self.batch) if recipe.correction.fixed_batches else None
        loss = parts.correction.backward(self._loss, *batch, index=index)
        if parts.device.type == "cpu":  # a GPU is looked at every so many steps: it would have to be waited for
            check_loss(loss, parts.model, batch[0], self.epoch, self.batch)
        self.apply_gradients()
        self.meter.see(self.batch, loss, self._logits, batch[1])

    def apply_gradients(self) -> None:
        """What follows a backward pass: clipping, optimizer and topology, average."""
        parts = self.parts
        if self.recipe.clip:
            parts.topology.hide_gradients()  # the norm is that of the active weights
            clip_gradients(parts.model, self.recipe.clip, self.epoch, self.batch)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        if parts.average is not None:
            parts.average.update()

    def _loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        with autocast(self.recipe, self.parts.device):
            loss, logits = weighed_loss(self.world, self.recipe.objective, model, batch)
        self._logits = logits.detach()  # of the last pass, which is the live model's
        return loss

    @property
    def full_pass_is_clean(self) -> bool:
        """Whether g̃ is the gradient of the clean loss (the paper) or of the objective's own.

        The latter is unbiased at the snapshot; on the way from it the steps' attacks move on and g̃'s do not.
        """
        return self.recipe.full_pass == "clean" and self.recipe.objective.attack_passes > 0

    def _full_loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        objective = Standard() if self.full_pass_is_clean else self.recipe.objective
        with autocast(self.recipe, self.parts.device):
            return weighed_loss(self.world, objective, model, batch)[0]

    def attack_generator(self, epoch: int, i: int, *purpose: str | int) -> torch.Generator | None:
        """The random numbers of the coming attack on batch i of an epoch, of this step and purpose alone."""
        if not self.recipe.objective.attack_passes:
            return None
        self.attacks += 1
        generator = own_generator(self.world, self.parts.device, self.parts.train.order.size(epoch, i))
        return generator.manual_seed(derive(self.recipe.seed, "attack", self.step, *purpose))

    def _set_learning_rate(self) -> None:
        factor = self.recipe.schedule.factor(self.step, self.recipe.epochs, len(self.parts.train))
        for group in self.parts.optimizer.param_groups:
            group["lr"] = self.recipe.optimizer.lr * factor * self.recipe.correction.learning_rate_factor
            group["lr"] *= self.recipe.rollback.factor**self.rollbacks

    # The end of an epoch

    def _finish_epoch(self) -> None:
        self.parts.topology.check_equal()
        scores = self.evaluate()
        line = strict(self._line(scores))
        self.history.append(line)
        accuracy = max(score.accuracy for score in scores.values())
        is_best = self.recipe.checkpoint.best and accuracy > self.best
        self.best = max(accuracy, self.best)
        self.epoch, self.batch = self.epoch + 1, 0
        self.meter = Meter(self.parts.device)
        if self.folder is not None:
            self.folder.append(line)
        if is_best or self.epoch % self.recipe.checkpoint.every == 0 or self.epoch == self.recipe.epochs:
            self.save(is_best)
        self.watcher.epoch(self, line)

    def evaluate(self, split: str | None = None) -> dict[str, Score]:
        """Plain, re-estimated and averaged, side by side."""
        parts, recipe = self.parts, self.recipe
        loader = parts.loaders[split or parts.judged_on]
        precision = partial(autocast, recipe, parts.device)
        return score_three_ways(
            parts.model, lambda: loader.epoch(0), self.fresh_images, parts.average, precision, self.world
        )

    def fresh_images(self) -> Iterator[Tensor]:
        """The training images that BatchNorm statistics are estimated anew from."""
        return (x for x, _ in islice(self.parts.train.epoch(0), self.recipe.bn_recalibration_batches))

    def _line(self, scores: dict[str, Score]) -> dict[str, Any]:
        parts = self.parts
        self._settle()
        on_gpu = parts.device.type == "cuda"
        meter = self.meter.of_all(self.world)
        return {
            "epoch": self.epoch + 1,
            "step": self.step,
            "learning_rate": parts.optimizer.param_groups[0]["lr"],
            "train_loss": meter.loss,
            "train_accuracy": meter.accuracy,
            "split": parts.judged_on,
            "scores": {name: {"loss": s.loss, "accuracy": s.accuracy} for name, s in scores.items()},
            "density": parts.topology.density,
            "exploration": parts.topology.exploration,
            "updates": parts.topology.updates,
            "correction": parts.correction.report(),
            "passes": self._passes(),
            "seconds": self.seconds,
            "startup_seconds": self.startup_seconds,
            "images_per_second": self.images / max(self.seconds, 1e-9),
            "peak_memory": torch.cuda.max_memory_allocated(parts.device) if on_gpu else None,
            **({"rollbacks": self.rollbacks} if self.recipe.rollback.times else {}),
        }

    def _settle(self) -> None:
        if self.captured is not None:
            self.captured.settle()

    def _passes(self) -> dict[str, int]:
        """Over batches; those of attacks, each a forward pass and a backward one to the images, by themselves."""
        objective = self.recipe.objective
        passes = {kind: count * objective.loss_passes for kind, count in self.parts.correction.passes.items()}
        return passes | ({"attack": self.attacks * objective.attack_passes} if objective.attack_passes else {})

    def result(self) -> dict[str, Any]:
        """Scores on the test images, the best accuracy of an epoch on the split it was judged on, seconds."""
        test = {name: asdict(score) for name, score in self.evaluate("test").items()}
        result = {"version": 1, "epochs": self.epoch, "best": self.best, "test": test, "seconds": self.seconds}
        return dict(strict(result | {"layers": describe_layers(self.parts.topology)}))

    # Checkpoints

    def _check_finite(self) -> None:
        """The loss of every step so far, and the weights: what the gradient of the last step has left."""
        self.meter.check(self.epoch)
        check_weights(self.parts.model, self.epoch, self.batch)

    def save(self, best: bool = False) -> None:
        self._check_finite()
        state = None if self.folder is None and self.world.alone else self.state_dict()
        if self.folder is not None and state is not None:
            self.folder.store.save(self.step, state, best)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bit for bit; of several processes the first one has it whole."""
        self._settle()
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.captured is not None:
            self.captured.release()
            self.captured = None
        self._random = restore(self, state)


def resume(folder: RunFolder, recipe: Recipe, watcher: Watcher | None = None, world: World = ALONE) -> Trainer:
    """A trainer that stands where the newest sound checkpoint of the folder was written."""
    if world.leads:
        folder.claim()
    trainer = Trainer(recipe, folder if world.leads else None, watcher, world)
    state = world.broadcast_object(folder.store.newest() if world.leads else None)
    if state is not None:
        trainer.load_state_dict(state)
    if world.leads:
        folder.forget_after(trainer.epoch)  # the epochs that are done again
        trainer.history = folder.metrics()
    return trainer
