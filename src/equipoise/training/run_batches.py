"""The batches of a run, by reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.data import FolderLoader, Loader
from equipoise.data.loader import assemble
from equipoise.seeds import derive
from equipoise.training.engine import Engine
from equipoise.training.precision import autocast
from equipoise.training.processes import own_generator
from equipoise.training.recipe import Recipe
from equipoise.world import World


class BatchRef(NamedTuple):
    """A batch by its position in the data.

    Attributes:
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 0.
        attacked: Whether its images are attacked.
        purpose: What the attack is for, which seeds it in addition to the step.
        raw: Whether its images are left without augmentation, as in the full pass of the published code.
    """

    epoch: int
    batch: int
    attacked: bool = False
    purpose: tuple[str | int, ...] = ()
    raw: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """Key of the work on batches of one size: whether they are attacked, and whether they are raw."""
        return self.attacked, self.raw


class RunBatches:
    """Makes batches from references to them, attacks included.

    If the engine captures, the batches that `prepare` makes stay at fixed addresses, because one recorded part of a
    step leaves them for the next.

    Args:
        recipe: The recipe of the run.
        model: The model, for attacks.
        loader: The training images.
        device: The device.
        world: The processes that train together.
        engine: Runs the work on the device.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        loader: Loader | FolderLoader,
        device: torch.device,
        world: World,
        engine: Engine,
    ) -> None:
        self._recipe, self._model, self._loader, self._device = recipe, model, loader, device
        self._world, self._engine = world, engine
        self._step = 0
        self.attacks = 0  # batches that have been attacked
        self.attacks_steps = recipe.objective.attack_passes > 0
        # In adversarial training g̃ is by default the gradient of the clean loss, as in the paper.
        self.full_pass_is_clean = self.attacks_steps and recipe.full_pass == "clean"
        self.full_pass_is_raw = recipe.as_published.raw_full_pass
        self._generators: dict[int, torch.Generator] = {}  # of attacks, by number of images over all processes
        self._fast_assemble = engine.compiled(assemble)
        self._fast_model = engine.compiled(model)
        self._ref: BatchRef | None = None
        self._batches: dict[tuple[tuple[bool, bool], int], tuple[Tensor, ...]] = {}
        self._stream: tuple[tuple[int, int], Iterator[tuple[Tensor, Tensor]]] | None = None

    def begin_step(self, number: int) -> None:
        """Set the number of the next step, which seeds its attacks."""
        self._step = number
        self._ref = None

    def prepare(self, ref: BatchRef) -> int:
        """Make a batch, attack it at the current weights if `ref.attacked`, and return its number of images."""
        size = self._size(ref)
        if ref != self._ref:
            generator = self._attack_generator(ref) if ref.attacked else None
            key = ("batch", *self.kind(ref, size)) if isinstance(self._loader, Loader) else None
            self._engine.run(key, partial(self._store, ref, size, generator))
            self._ref = ref
        return size

    def begin(self, ref: BatchRef) -> tuple[int, Callable[[], tuple[Tensor, ...]]]:
        """Begin a batch whose work is captured together with its pass, so that it needs no fixed addresses.

        Returns:
            The number of images, and a function that makes the batch, with work on the device only.
        """
        size = self._size(ref)
        generator = self._attack_generator(ref) if ref.attacked else None
        return size, partial(self._make, ref, size, generator)

    def of(self, ref: BatchRef, size: int) -> tuple[Tensor, ...]:
        """The last batch of this kind that `prepare` has made: images, labels, and what the objective adds."""
        return self._batches[ref.kind, size]

    def kind(self, ref: BatchRef, size: int) -> tuple[bool, bool, int, int]:
        """Key of the work of a pass: attacked, raw, images of this process, images of all processes."""
        return *ref.kind, size, self.images_of_all(ref)

    def images_of_all(self, ref: BatchRef) -> int:
        """Number of images of a batch, over all processes."""
        return self._loader.order.size(ref.epoch, ref.batch)

    def is_usual(self, ref: BatchRef) -> bool:
        """Whether a batch is worth compiling for; a last, smaller one is not."""
        return self.images_of_all(ref) == self._loader.order.batch

    def _size(self, ref: BatchRef) -> int:
        """Number of images of this process's share of a batch; points the loader at the batch."""
        if isinstance(self._loader, Loader):
            return self._loader.place(ref.epoch, ref.batch)
        return len(range(self._world.rank, self._loader.order.size(ref.epoch, ref.batch), self._world.size))

    def _attack_generator(self, ref: BatchRef) -> torch.Generator:
        self.attacks += 1
        images = 0 if self._world.alone else self.images_of_all(ref)
        if images not in self._generators:
            self._generators[images] = own_generator(self._world, self._device, images)
            self._engine.register(self._generators[images])
        generator = self._generators[images]
        return generator.manual_seed(derive(self._recipe.seed, "attack", self._step, *ref.purpose))

    def _store(self, ref: BatchRef, size: int, generator: torch.Generator | None) -> None:
        old = self._batches.get((ref.kind, size))
        self._batches[ref.kind, size] = self._engine.kept(old, self._make(ref, size, generator))

    def _make(self, ref: BatchRef, size: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        x, y = self._images(ref, size)
        batch: tuple[Tensor, ...] = (x, y)
        if ref.attacked or not self.attacks_steps:
            fast = self.is_usual(ref) and self._engine.captures
            model = self._fast_model if fast else self._model
            with autocast(self._recipe.precision, self._device):
                batch = self._recipe.objective.prepare(model, x, y, generator)  # type: ignore[arg-type]
            if self._recipe.as_published.raw_gradient and not ref.raw:
                batch = (*batch, self._images(ref._replace(raw=True), size)[0])
        return batch

    def _images(self, ref: BatchRef, size: int) -> tuple[Tensor, Tensor]:
        if isinstance(self._loader, Loader):
            return self._loader.assemble(size, self._fast_assemble if self.is_usual(ref) else assemble, ref.raw)
        position = (ref.epoch, ref.batch)
        if self._stream is None or self._stream[0] != position:
            self._stream = (position, self._loader.epoch(ref.epoch, start=ref.batch))
        images = next(self._stream[1])
        self._stream = ((ref.epoch, ref.batch + 1), self._stream[1])
        return images


class RefreshBatches:
    """References to the batches of a refresh, which can be counted before they are run.

    They are the batches of the steps `first`, `first + 1`, ..., in the next epoch if the current one has no more.

    Args:
        batches: Attacks the batches, at the weights that the model has when they are reached.
        per_epoch: Number of batches of an epoch.
        first: Number of the first step.
        count: Number of batches.
    """

    def __init__(self, batches: RunBatches, per_epoch: int, first: int, count: int) -> None:
        self._batches, self._per_epoch, self._first, self._count = batches, per_epoch, first, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[BatchRef]]:
        attacked = self._batches.attacks_steps and not self._batches.full_pass_is_clean
        for i in range(self._count):
            epoch, batch = divmod(self._first + i, self._per_epoch)
            # Without an attack the reference equals the one of the step: replay compares them.
            ref = BatchRef(epoch, batch, attacked, ("refresh", i) if attacked else (), self._batches.full_pass_is_raw)
            if attacked:
                self._batches.prepare(ref)
            yield (ref,)
