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

from equipoise.correction import NonFiniteLoss
from equipoise.correction.snapshot import Random
from equipoise.errors import UserError
from equipoise.objective import Standard
from equipoise.seeds import derive
from equipoise.train.captured import CapturedStep, obstacle
from equipoise.train.evaluate import Score, score_three_ways
from equipoise.train.folder import RunFolder, strict
from equipoise.train.meter import Meter
from equipoise.train.parts import autocast, make_parts
from equipoise.train.recipe import Recipe, split
from equipoise.train.storage import in_storage, plain_names
from equipoise.train.watch import Watcher

CHECK_EVERY = 50  # steps between looks at the losses on a GPU, where each look waits for the device


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
            if trainer.full_pass_is_clean:
                yield x, y
            else:
                generator = trainer.attack_generator("refresh", i)
                with autocast(trainer.recipe, trainer.parts.device):
                    batch = trainer.recipe.objective.prepare(trainer.parts.model, x, y, generator)
                yield batch

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        loader = self._trainer.parts.train
        epoch, start = divmod(self._first, len(loader))
        while True:
            yield from loader.epoch(epoch, start)
            epoch, start = epoch + 1, 0


class Trainer:
    """Runs a recipe, writes its folder, and goes on from where a checkpoint stopped, bit for bit."""

    def __init__(self, recipe: Recipe, folder: RunFolder | None = None, watcher: Watcher | None = None) -> None:
        self.recipe = recipe
        self.folder = folder
        self.watcher = watcher or Watcher()
        self.parts = make_parts(recipe)
        self.epoch = 0
        self.batch = 0
        self.best = -1.0
        self.seconds = 0.0
        self.images = 0
        self.attacks = 0  # batches that have been attacked, those of full passes included
        self.meter = Meter(self.parts.device)
        self.history: list[dict[str, Any]] = []
        self.captured: CapturedStep | None = None
        self._may_capture = recipe.engine == "auto" and self.parts.device.type == "cuda"
        torch.manual_seed(derive(recipe.seed, "training"))
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
        if estimator.corrects and estimator.source == estimator.way:
            name, options = split(raw["correction"], "correction")
            raw["correction"] = {"name": name, **options, "way": estimator.way}
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
        try:
            while self.epoch < self.recipe.epochs:
                self._run_epoch()
        finally:
            self._random = Random(self.parts.device)
            self.watcher.end()
        return self.result()

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
            if self._checkpoint_is_due():
                self._count_seconds(started)
                self.save()
                started = time.perf_counter()
        self.meter.check(self.epoch)
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
        """Of training alone: neither evaluation nor the writing of checkpoints counts."""
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started

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
        return len(y)

    def _eager_step(self, x: Tensor, y: Tensor) -> None:
        parts, recipe = self.parts, self.recipe
        with autocast(recipe, parts.device):
            batch = recipe.objective.prepare(parts.model, x, y, self.attack_generator())
        index = parts.train.index(self.epoch, self.batch) if recipe.correction.fixed_batches else None
        loss = parts.correction.backward(self._loss, *batch, index=index)
        self.apply_gradients()
        self.meter.see(self.batch, loss, self._logits, batch[1])

    def apply_gradients(self) -> None:
        """What follows a backward pass: clipping, optimizer and topology, average."""
        parts = self.parts
        if self.recipe.clip:
            parts.topology.hide_gradients()  # the norm is that of the active weights
            nn.utils.clip_grad_norm_(parts.model.parameters(), self.recipe.clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        if parts.average is not None:
            parts.average.update(parts.topology)

    def _loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        with autocast(self.recipe, self.parts.device):
            loss, logits = self.recipe.objective.loss(model, *batch)
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
            return objective.loss(model, *batch)[0]

    def attack_generator(self, *purpose: str | int) -> torch.Generator | None:
        """The random numbers of the coming attack, of this step and purpose alone."""
        if not self.recipe.objective.attack_passes:
            return None
        self.attacks += 1
        generator = torch.Generator(self.parts.device)
        return generator.manual_seed(derive(self.recipe.seed, "attack", self.step, *purpose))

    def _set_learning_rate(self) -> None:
        factor = self.recipe.schedule.factor(self.step, self.recipe.epochs, len(self.parts.train))
        for group in self.parts.optimizer.param_groups:
            group["lr"] = self.recipe.optimizer.lr * factor * self.recipe.correction.learning_rate_factor

    # The end of an epoch

    def _finish_epoch(self) -> None:
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
        return score_three_ways(parts.model, lambda: loader.epoch(0), self.fresh_images, parts.average, precision)

    def fresh_images(self) -> Iterator[Tensor]:
        """The training images that BatchNorm statistics are estimated anew from."""
        return (x for x, _ in islice(self.parts.train.epoch(0), self.recipe.reestimate))

    def _line(self, scores: dict[str, Score]) -> dict[str, Any]:
        parts = self.parts
        self._settle()
        on_gpu = parts.device.type == "cuda"
        return {
            "epoch": self.epoch + 1,
            "step": self.step,
            "learning_rate": parts.optimizer.param_groups[0]["lr"],
            "train_loss": self.meter.loss,
            "train_accuracy": self.meter.accuracy,
            "split": parts.judged_on,
            "scores": {name: {"loss": s.loss, "accuracy": s.accuracy} for name, s in scores.items()},
            "density": parts.topology.density,
            "exploration": parts.topology.exploration,
            "updates": parts.topology.updates,
            "correction": parts.correction.report(),
            "passes": self._passes(),
            "seconds": self.seconds,
            "images_per_second": self.images / max(self.seconds, 1e-9),
            "peak_memory": torch.cuda.max_memory_allocated(parts.device) if on_gpu else None,
        }

    def _settle(self) -> None:
        if self.captured is not None:
            self.captured.settle()

    def _passes(self) -> dict[str, int]:
        """Over batches; those of attacks, each a forward pass and a backward one to the images, by themselves."""
        attack = self.recipe.objective.attack_passes
        return self.parts.correction.passes | ({"attack": self.attacks * attack} if attack else {})

    def result(self) -> dict[str, Any]:
        """Scores on the test images, the best accuracy of an epoch on the split it was judged on, seconds."""
        test = {name: asdict(score) for name, score in self.evaluate("test").items()}
        result = {"version": 1, "epochs": self.epoch, "best": self.best, "test": test, "seconds": self.seconds}
        return dict(strict(result))

    # Checkpoints

    def save(self, best: bool = False) -> None:
        self.meter.check(self.epoch)
        if self.folder is not None:
            self.folder.store.save(self.step, self.state_dict(), best)

    def state_dict(self) -> dict[str, Any]:
        parts = self.parts
        self._settle()
        return {
            "kinds": self.recipe.kinds,
            "storage": parts.topology.storage,
            "names": self._names(),
            "position": [self.epoch, self.batch, self.images, self.attacks],
            "best": self.best,
            "seconds": self.seconds,
            "model": parts.model.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "topology": parts.topology.state_dict(),
            "correction": parts.correction.state_dict(),
            "average": None if parts.average is None else parts.average.state_dict(),
            "meter": self.meter.state_dict(),
            "random": list(Random(parts.device).state()),
        }

    def _names(self) -> dict[str, list[str]]:
        """What tensors that are known by their position belong to, in whatever storage."""
        names = plain_names(self.parts.model)
        groups = self.parts.optimizer.param_groups
        return {
            "model": [names[id(p)] for p in self.parts.model.parameters() if p.requires_grad],
            "optimizer": [names[id(p)] for group in groups for p in group["params"]],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._load(state)
        except UserError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"the checkpoint does not fit the recipe: {line[:200]}") from None

    def _load(self, state: dict[str, Any]) -> None:
        parts = self.parts
        if self.captured is not None:
            self.captured.release()
            self.captured = None
        for part, kind in self.recipe.kinds.items():
            if state["kinds"][part] != kind:
                raise UserError(f"the checkpoint is of the {part} {state['kinds'][part]}, the recipe has {kind}")
        topology = parts.topology
        state = in_storage(
            state, topology.storage, {layer.name: tuple(layer.mask().shape) for layer in topology.layers}
        )
        parts.model.load_state_dict(state["model"])
        parts.optimizer.load_state_dict(state["optimizer"])
        parts.topology.load_state_dict(state["topology"])
        parts.correction.load_state_dict(state["correction"])
        if parts.average is not None:
            if state["average"] is None:
                raise UserError("the checkpoint has no weight average, which the recipe asks for")
            parts.average.load_state_dict(state["average"])
        self.epoch, self.batch, self.images, self.attacks = state["position"]
        self.best, self.seconds = state["best"], state["seconds"]
        self.meter.load_state_dict(state["meter"])
        cpu, cuda = state["random"]
        self._random = Random.of(cpu, cuda, parts.device)
        self._random.restore()


def resume(folder: RunFolder, recipe: Recipe, watcher: Watcher | None = None) -> Trainer:
    """A trainer that stands where the newest sound checkpoint of the folder was written."""
    folder.claim()
    trainer = Trainer(recipe, folder, watcher)
    state = folder.store.newest()
    if state is not None:
        trainer.load_state_dict(state)
    folder.forget_after(trainer.epoch)  # the epochs that are done again
    trainer.history = folder.metrics()
    return trainer
