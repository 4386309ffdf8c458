"""The passes of a correction, and the gradients it reads and changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.batches import LossFunction, run_loss
from equipoise.topology import Topology
from equipoise.world import World, by_itself

Batch = tuple[Any, ...]  # the arguments of the loss function after the model


class Gradients:
    """Runs the passes of a correction on a model and accumulates gradients in `.grad` of its parameters.

    An engine that runs passes in another way or keeps the gradients elsewhere overrides these methods. `at_snapshot`
    tells it that the model has the tensors of the snapshot, which are at other addresses than the live ones.
    """

    def active_vector(
        self, parameters: Sequence[nn.Parameter], topology: Topology | None, every_index: bool = False
    ) -> ActiveVector:
        """Make the active vector that the other methods take."""
        return ActiveVector(parameters, topology, every_index)

    @torch.no_grad()
    def loss(self, loss_fn: LossFunction, model: nn.Module, batch: Batch, at_snapshot: bool = False) -> Tensor:
        """Run forward without gradients at the weights that the model has now."""
        with by_itself(model):
            return run_loss(loss_fn, model, batch).detach()

    @torch.enable_grad()
    def differentiate(
        self,
        loss_fn: LossFunction,
        model: nn.Module,
        batch: Batch,
        vector: ActiveVector,
        at_snapshot: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch and its gradient as an active vector; `.grad` is not changed."""
        with by_itself(model):
            loss = run_loss(loss_fn, model, batch)
        trained = [p for p in vector.parameters if p.requires_grad]  # some may be frozen since the vector was made
        found = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        gradients = [next(found) if p.requires_grad else None for p in vector.parameters]
        return loss.detach(), vector.pack_gradients(gradients)

    def backward(
        self, loss_fn: LossFunction, model: nn.Module, batch: Batch, scale: float, topology: Topology | None
    ) -> Tensor:
        """Run forward and backward, add `scale` times the gradient to `.grad`, and return the (unscaled) loss.

        The hooks of the topology record the gradients of inactive weights; an engine without hooks calls it instead.
        """
        with by_itself(model, live=True):
            loss = run_loss(loss_fn, model, batch)
            (loss if scale == 1 else loss * scale).backward()
        return loss.detach()

    def is_empty(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether nothing was accumulated yet in this step."""
        return all(p.grad is None for p in parameters)

    def read(self, vector: ActiveVector) -> Tensor:
        """Return the accumulated gradients as an active vector."""
        return vector.pack_gradients([p.grad for p in vector.parameters])

    def read_or_none(self, vector: ActiveVector) -> Tensor | None:
        """Like `read`; `None` if nothing was accumulated yet in this step."""
        return None if self.is_empty(vector.parameters) else self.read(vector)

    @torch.no_grad()
    def add(self, vector: ActiveVector, delta: Tensor) -> None:
        """Add an active vector to the accumulated gradients.

        A parameter without gradient gets one if it took part in other batches: its g̃ is not zero.
        """
        for i, parameter in enumerate(vector.parameters):
            if parameter.grad is None and parameter.requires_grad and i in vector.used:
                parameter.grad = torch.zeros_like(parameter)
        vector.add_to([p.grad for p in vector.parameters], delta)

    @torch.no_grad()
    def all_reduce_mean(
        self, world: World, parameters: Sequence[nn.Parameter], others: Sequence[Tensor]
    ) -> list[Tensor]:
        """Average `.grad` and `others` over the processes, in one all-reduce.

        Gradients are averaged in place; the means of `others` are returned. A parameter that takes part in the loss
        of some processes only has a zero gradient in the others.
        """
        if world.alone:
            return list(others)
        missing = {i for i, p in enumerate(parameters) if p.grad is None}
        for i in missing:
            parameters[i].grad = torch.zeros_like(parameters[i])
        own = [p.grad for p in parameters if p.grad is not None]
        used = own[0].new_tensor([float(i not in missing) for i in range(len(parameters))])
        means = world.all_reduce_mean([*own, used, *others])
        for tensor, mean in zip(own, means, strict=False):
            tensor.copy_(mean)
        if missing:
            for parameter, fraction in zip(parameters, means[len(own)].tolist(), strict=True):
                if fraction == 0:
                    parameter.grad = None
        # Clones: a view of the loss would keep the whole bucket alive.
        return [mean.clone() for mean in means[len(own) + 1 :]]
