"""Forward and backward passes on the batches of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.objectives import Objective, Standard
from equipoise.objectives.adversarial_training import without_statistics
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import MaskedWeight, copy_active
from equipoise.topology import Topology
from equipoise.training.engine import Engine
from equipoise.training.precision import autocast
from equipoise.training.recipe import Recipe
from equipoise.training.run_batches import BatchRef, RunBatches
from equipoise.world import World


class Outcome(NamedTuple):
    """Loss, logits and labels of a pass."""

    loss: Tensor
    logits: Tensor
    labels: Tensor


class Passes:
    """Runs the model on batches.

    If the engine captures, gradients stay at fixed addresses, and so do the loss and logits that one recorded part of a
    step leaves for the next.

    Args:
        recipe: The recipe of the run.
        model: The model.
        batches: Makes the batches.
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
        batches: RunBatches,
        device: torch.device,
        world: World,
        engine: Engine,
        flat: FlatParameters | None,
        topology: Topology,
    ) -> None:
        self._recipe, self._model, self._batches, self._device = recipe, model, batches, device
        self._world, self._engine, self._flat = world, engine, flat
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._masked = {id(layer.parameter): layer for layer in topology.layers if isinstance(layer, MaskedWeight)}
        clean = Standard() if batches.full_pass_is_clean else recipe.objective
        raw = recipe.as_published.raw_gradient
        losses = {
            (True, False): self._loss_of(recipe.objective, raw),
            (False, False): self._loss_of(clean, 0 if batches.full_pass_is_clean else raw),
            (False, True): self._loss_of(clean),
        }
        self._copy_active = engine.compiled(copy_active, combine=True)
        self._losses = losses
        self._fast_losses = {kind: engine.compiled(loss) for kind, loss in losses.items()}
        self._outputs: dict[int, Tensor] = {}  # logits by batch size
        self._loss = torch.zeros((), dtype=self._parameters[0].dtype, device=device)

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

    def begin(self, ref: BatchRef) -> tuple[int, Callable[[], Outcome]]:
        """Begin a pass on a batch that is captured as a whole, so that its batch and logits need no fixed addresses.

        Returns:
            The number of images, and a function that makes the batch, leaves its gradient in the flat vector, zero for
            inactive weights, and returns loss, logits and labels, all on the device.
        """
        size, make = self._batches.begin(ref)

        def work() -> Outcome:
            batch = make()
            return Outcome(*self._differentiate(ref, size, batch, hide=True), batch[1])

        return size, work

    def loss(self, model: nn.Module, ref: BatchRef) -> Tensor:
        """Mean loss of a batch, with its autograd graph, at the weights that the model has now."""
        size = self._batches.prepare(ref)
        loss, logits = self._forward(ref, size, self._batches.of(ref, size))
        self._outputs[size] = logits.detach()
        return loss

    def evaluate(self, ref: BatchRef, at_snapshot: bool) -> Tensor:
        """Mean loss of a batch, without gradient."""
        size = self._batches.prepare(ref)
        self._engine.run(
            ("evaluate", at_snapshot, *self._batches.kind(ref, size)), partial(self._evaluate, ref, size)
        )
        return self._loss.clone()

    def _evaluate(self, ref: BatchRef, size: int) -> None:
        with torch.enable_grad():  # one compilation serves both kinds of pass
            self._loss.copy_(self._forward(ref, size, self._batches.of(ref, size))[0].detach())

    def differentiate(self, ref: BatchRef, at_snapshot: bool, hide: bool = False) -> Tensor:
        """Mean loss of a batch; its gradient is then in the flat gradient vector.

        Args:
            ref: The batch.
            at_snapshot: Whether the model has the weights of a snapshot.
            hide: Whether the gradient of inactive weights is set to zero.
        """
        size = self._batches.prepare(ref)
        key = ("differentiate", at_snapshot, hide, *self._batches.kind(ref, size))
        self._engine.run(key, partial(self._store_pass, ref, size, hide))
        return self._loss.clone()

    def _store_pass(self, ref: BatchRef, size: int, hide: bool) -> None:
        loss, logits = self._differentiate(ref, size, self._batches.of(ref, size), hide)
        self._loss.copy_(loss)
        (self._outputs[size],) = self._engine.kept(
            (self._outputs[size],) if size in self._outputs else None, (logits,)
        )

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
        losses = self._fast_losses if self._batches.is_usual(ref) else self._losses
        loss, logits = losses[ref.kind](*batch)
        if not self._world.alone:
            # Each process has a share of the batch: the mean over the processes is the mean over the batch.
            loss = loss * (self._world.size * size / self._batches.images_of_all(ref))
        return loss, logits

    def outcome(self, ref: BatchRef, size: int) -> tuple[Tensor, Tensor]:
        """Logits and labels of the last pass on a batch of this kind."""
        return self._outputs[size], self._batches.of(ref, size)[1]
