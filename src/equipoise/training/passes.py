"""Forward and backward passes on the batches of a run, by reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.data import FolderLoader, Loader
from equipoise.data.loader import assemble
from equipoise.objectives import Objective, Standard
from equipoise.objectives.adversarial_training import without_statistics
from equipoise.seeds import derive
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import MaskedWeight, copy_active
from equipoise.topology import Topology
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


class Outcome(NamedTuple):
    """Loss, logits and labels of a pass."""

    loss: Tensor
    logits: Tensor
    labels: Tensor


class Passes:
    """Makes batches from references to them, attacks included, and runs the model on them.

    If the engine captures, gradients stay at fixed addresses, and so do the batch, loss and logits that one recorded
    part of a step leaves for the next.

    Args:
        recipe: The recipe of the run.
        model: The model.
        loader: The training images.
        device: The device.
        world: The processes that train together.
        engine: Runs the passes.
        flat: Where gradients are written; `None` if autograd accumulates them in `.grad`.
        topology: The topology of the model, whose inactive weights have no gradient in a training step.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        loader: Loader | FolderLoader,
        device: torch.device,
        world: World,
        engine: Engine,
        flat: FlatParameters | None,
        topology: Topology,
    ) -> None:
        self._recipe, self._model, self._loader, self._device = recipe, model, loader, device
        self._world, self._engine, self._flat = world, engine, flat
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masked = {id(layer.parameter): layer for layer in topology.layers if isinstance(layer, MaskedWeight)}
        self._step = 0
        self.attacks = 0  # batches that have been attacked
        self.attacks_steps = recipe.objective.attack_passes > 0
        # In adversarial training g̃ is by default the gradient of the clean loss, as in the paper.
        self.full_pass_is_clean = self.attacks_steps and recipe.full_pass == "clean"
        self.full_pass_is_raw = recipe.as_published.raw_full_pass
        clean = Standard() if self.full_pass_is_clean else recipe.objective
        raw = recipe.as_published.raw_gradient
        losses = {
            (True, False): self._loss_of(recipe.objective, raw),
            (False, False): self._loss_of(clean, 0 if self.full_pass_is_clean else raw),
            (False, True): self._loss_of(clean),
        }
        self._generators: dict[int, torch.Generator] = {}  # of attacks, by number of images over all processes
        self._fast_assemble = engine.compiled(assemble)
        self._fast_model = engine.compiled(model)
        self._copy_active = engine.compiled(copy_active, combine=True)
        self._losses = losses
        self._fast_losses = {kind: engine.compiled(loss) for kind, loss in losses.items()}
        self._ref: BatchRef | None = None
        self._batches: dict[tuple[tuple[bool, bool], int], tuple[Tensor, ...]] = {}
        self._outputs: dict[int, Tensor] = {}  # logits by batch size
        self._loss = torch.zeros((), dtype=self._parameters[0].dtype, device=device)
        self._stream: tuple[tuple[int, int], Iterator[tuple[Tensor, Tensor]]] | None = None

    def _loss_of(self, objective: Objective, raw_gradient: float = 0.0) -> Callable[..., tuple[Tensor, Tensor]]:
        """The loss of a batch; with a fraction, mixed with the loss of its raw images, which are its last tensor."""

        def loss(*batch: Tensor) -> tuple[Tensor, Tensor]:
            with autocast(self._recipe.precision, self._device):
                return objective.loss(self._model, *batch)

        def mixed(*batch: Tensor) -> tuple[Tensor, Tensor]:
            with autocast(self._recipe.precision, self._device):
                own, logits = objective.loss(self._model, *batch[:-1])
                raw, _ = clean.loss(lambda x: without_statistics(self._model, x), batch[-1], batch[1])
                return torch.lerp(own, raw, raw_gradient), logits

        clean = objective if isinstance(objective, Standard) else Standard()
        return mixed if raw_gradient else loss

    def begin_step(self, number: int) -> None:
        """Set the number of the next step, which seeds its attacks."""
        self._step = number
        self._ref = None

    # Batches

    def prepare(self, ref: BatchRef) -> int:
        """Make a batch, attack it at the current weights if `ref.attacked`, and return its number of images."""
        size = self._size(ref)
        if ref != self._ref:
            generator = self._attack_generator(ref) if ref.attacked else None
            key = ("batch", *self.kind(ref, size)) if isinstance(self._loader, Loader) else None
            self._engine.run(key, partial(self._store_batch, ref, size, generator))
            self._ref = ref
        return size

    def begin(self, ref: BatchRef) -> tuple[int, Callable[[], Outcome]]:
        """Begin a pass on a batch that is captured as a whole, so that its batch and logits need no fixed addresses.

        Returns:
            The number of images, and a function that makes the batch, leaves its gradient in the flat vector, zero for
            inactive weights, and returns loss, logits and labels, all on the device.
        """
        size = self._size(ref)
        generator = self._attack_generator(ref) if ref.attacked else None

        def work() -> Outcome:
            batch = self._make_batch(ref, size, generator)
            return Outcome(*self._differentiate(ref, size, batch, hide=True), batch[1])

        return size, work

    def _size(self, ref: BatchRef) -> int:
        """Number of images of this process's share of a batch; points the loader at the batch."""
        if isinstance(self._loader, Loader):
            return self._loader.place(ref.epoch, ref.batch)
        return len(range(self._world.rank, self._loader.order.size(ref.epoch, ref.batch), self._world.size))

    def _images_of_all(self, ref: BatchRef) -> int:
        """Number of images of a batch, over all processes."""
        return self._loader.order.size(ref.epoch, ref.batch)

    def kind(self, ref: BatchRef, size: int) -> tuple[bool, bool, int, int]:
        """Key of the work of a pass: attacked, raw, images of this process, images of all processes."""
        return *ref.kind, size, self._images_of_all(ref)

    def _attack_generator(self, ref: BatchRef) -> torch.Generator:
        self.attacks += 1
        images = 0 if self._world.alone else self._images_of_all(ref)
        if images not in self._generators:
            self._generators[images] = own_generator(self._world, self._device, images)
            self._engine.register(self._generators[images])
        generator = self._generators[images]
        return generator.manual_seed(derive(self._recipe.seed, "attack", self._step, *ref.purpose))

    def _store_batch(self, ref: BatchRef, size: int, generator: torch.Generator | None) -> None:
        old = self._batches.get((ref.kind, size))
        self._batches[ref.kind, size] = self._kept(old, self._make_batch(ref, size, generator))

    def _make_batch(self, ref: BatchRef, size: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        x, y = self._images(ref, size)
        batch: tuple[Tensor, ...] = (x, y)
        if ref.attacked or not self.attacks_steps:
            fast = self._is_usual(ref) and self._engine.captures
            model = self._fast_model if fast else self._model
            with autocast(self._recipe.precision, self._device):
                batch = self._recipe.objective.prepare(model, x, y, generator)  # type: ignore[arg-type]
            if self._recipe.as_published.raw_gradient and not ref.raw:
                batch = (*batch, self._images(ref._replace(raw=True), size)[0])
        return batch

    def _images(self, ref: BatchRef, size: int) -> tuple[Tensor, Tensor]:
        if isinstance(self._loader, Loader):
            return self._loader.assemble(size, self._fast_assemble if self._is_usual(ref) else assemble, ref.raw)
        position = (ref.epoch, ref.batch)
        if self._stream is None or self._stream[0] != position:
            self._stream = (position, self._loader.epoch(ref.epoch, start=ref.batch))
        images = next(self._stream[1])
        self._stream = ((ref.epoch, ref.batch + 1), self._stream[1])
        return images

    def _is_usual(self, ref: BatchRef) -> bool:
        """Whether a batch is worth compiling for; a last, smaller one is not."""
        return self._images_of_all(ref) == self._loader.order.batch

    def _kept(self, old: tuple[Tensor, ...] | None, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors with these values: copies at fixed addresses if the engine captures."""
        if not self._engine.captures:
            return new
        kept = tuple(torch.empty_like(tensor) for tensor in new) if old is None else old
        for there, tensor in zip(kept, new, strict=True):
            there.copy_(tensor)
        return kept

    # Passes

    def loss(self, model: nn.Module, ref: BatchRef) -> Tensor:
        """Mean loss of a batch, with its autograd graph, at the weights that the model has now."""
        size = self.prepare(ref)
        loss, logits = self._forward(ref, size, self._batches[ref.kind, size])
        self._outputs[size] = logits.detach()
        return loss

    def evaluate(self, ref: BatchRef, at_snapshot: bool) -> Tensor:
        """Mean loss of a batch, without gradient."""
        size = self.prepare(ref)
        self._engine.run(("evaluate", at_snapshot, *self.kind(ref, size)), partial(self._evaluate, ref, size))
        return self._loss.clone()

    def _evaluate(self, ref: BatchRef, size: int) -> None:
        with torch.enable_grad():  # one compilation serves both kinds of pass
            self._loss.copy_(self._forward(ref, size, self._batches[ref.kind, size])[0].detach())

    def differentiate(self, ref: BatchRef, at_snapshot: bool, hide: bool = False) -> Tensor:
        """Mean loss of a batch; its gradient is then in the flat gradient vector.

        Args:
            ref: The batch.
            at_snapshot: Whether the model has the weights of a snapshot.
            hide: Whether the gradient of inactive weights is set to zero.
        """
        size = self.prepare(ref)
        key = ("differentiate", at_snapshot, hide, *self.kind(ref, size))
        self._engine.run(key, partial(self._store_pass, ref, size, hide))
        return self._loss.clone()

    def _store_pass(self, ref: BatchRef, size: int, hide: bool) -> None:
        loss, logits = self._differentiate(ref, size, self._batches[ref.kind, size], hide)
        self._loss.copy_(loss)
        (self._outputs[size],) = self._kept((self._outputs[size],) if size in self._outputs else None, (logits,))

    def _differentiate(
        self, ref: BatchRef, size: int, batch: tuple[Tensor, ...], hide: bool
    ) -> tuple[Tensor, Tensor]:
        """Leave the gradient of a batch in the flat vector; return loss and logits."""
        assert self._flat is not None
        with torch.enable_grad():
            loss, logits = self._forward(ref, size, batch)
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = [(p, g) for p, g in zip(self._parameters, found, strict=True) if g is not None]
        if len(pairs) < len(found):
            self._flat.gradient.zero_()
        targets, gradients = [self._flat.gradient_of(p) for p, _ in pairs], [g for _, g in pairs]
        if hide:
            masked = [self._masked.get(id(p)) for p, _ in pairs]
            self._copy_active(targets, gradients, [None if layer is None else layer.activity for layer in masked])
        else:
            torch._foreach_copy_(targets, gradients)
        return loss.detach(), logits.detach()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of a parameter after the passes of a step."""
        return parameter.grad if self._flat is None else self._flat.gradient_of(parameter)

    def clear_gradients(self) -> None:
        """Clear the gradients of a step; a flat vector is written over by the next pass."""
        if self._flat is None:
            self._model.zero_grad()

    def _forward(self, ref: BatchRef, size: int, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        losses = self._fast_losses if self._is_usual(ref) else self._losses
        loss, logits = losses[ref.kind](*batch)
        if not self._world.alone:
            # Each process has a share of the batch: the mean over the processes is the mean over the batch.
            loss = loss * (self._world.size * size / self._images_of_all(ref))
        return loss, logits

    # Results of the last pass at the live weights

    def outcome(self, ref: BatchRef, size: int) -> tuple[Tensor, Tensor]:
        """Logits and labels of the last pass on a batch of this kind."""
        return self._outputs[size], self._batches[ref.kind, size][1]

    def images(self, ref: BatchRef, size: int) -> Tensor:
        """The images of the last batch of this kind."""
        return self._batches[ref.kind, size][0]


class RefreshBatches:
    """References to the batches of a refresh, which can be counted before they are run.

    They are the batches of the steps `first`, `first + 1`, ..., in the next epoch if the current one has no more.

    Args:
        passes: Attacks the batches, at the weights that the model has when they are reached.
        batches: Number of batches of an epoch.
        first: Number of the first step.
        count: Number of batches.
    """

    def __init__(self, passes: Passes, batches: int, first: int, count: int) -> None:
        self._passes, self._batches, self._first, self._count = passes, batches, first, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[BatchRef]]:
        attacked = self._passes.attacks_steps and not self._passes.full_pass_is_clean
        for i in range(self._count):
            epoch, batch = divmod(self._first + i, self._batches)
            # Without an attack the reference equals the one of the step: replay compares them.
            ref = BatchRef(epoch, batch, attacked, ("refresh", i) if attacked else (), self._passes.full_pass_is_raw)
            if attacked:
                self._passes.prepare(ref)
            yield (ref,)
