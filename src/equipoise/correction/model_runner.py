"""The passes of a correction, counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.batches import LossFunction
from equipoise.correction.gradients import Batch, Gradients
from equipoise.correction.snapshot import Snapshot, without_trace
from equipoise.topology import Topology
from equipoise.world import World


class Runner:
    """Runs the model of a correction at the live weights and at the snapshot, and counts the passes."""

    def __init__(self, model: nn.Module, topology: Topology | None, world: World, gradients: Gradients) -> None:
        self.model = model
        self.topology = topology
        self.world = world
        self.gradients = gradients
        self.snapshot = Snapshot(model)
        self.passes = {"forward": 0, "backward": 0}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained at present; some may be frozen or unfrozen during training."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def every_index(self) -> bool:
        """Whether inactive weights are corrected too, for growth by the corrected gradient."""
        return self.topology is not None and self.topology.growth.corrected

    def active_vector(self) -> ActiveVector:
        """Make the vector of the weights that are corrected from now on."""
        return self.gradients.active_vector(self.parameters, self.topology, self.every_index)

    def old_loss(self, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """Run forward at the snapshot."""
        self.passes["forward"] += 1
        with self.snapshot.at():
            return self.gradients.loss(loss_fn, self.model, batch, at_snapshot=True)

    def live_loss(self, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """Run forward at the live weights, without a trace in buffers and random number generators."""
        self.passes["forward"] += 1
        with without_trace(self.model, self.device):
            return self.gradients.loss(loss_fn, self.model, batch)

    def gradient(self, loss_fn: LossFunction, batch: Batch, vector: ActiveVector) -> tuple[Tensor, Tensor]:
        """Return loss and gradient at the live weights; accumulated gradients are not changed."""
        return self._differentiate(loss_fn, batch, vector, at_snapshot=False)

    def old_gradient(self, loss_fn: LossFunction, batch: Batch, vector: ActiveVector) -> tuple[Tensor, Tensor]:
        """Return loss and gradient at the snapshot."""
        with self.snapshot.at():
            return self._differentiate(loss_fn, batch, vector, at_snapshot=True)

    def _differentiate(
        self, loss_fn: LossFunction, batch: Batch, vector: ActiveVector, at_snapshot: bool
    ) -> tuple[Tensor, Tensor]:
        self.count()
        return self.gradients.differentiate(loss_fn, self.model, batch, vector, at_snapshot)

    def backward(self, loss_fn: LossFunction, batch: Batch, scale: float) -> Tensor:
        """Add the gradient at the live weights to the accumulated ones; return the loss."""
        self.count()
        return self.gradients.backward(loss_fn, self.model, batch, scale, self.topology)

    def count(self, passes: int = 1) -> None:
        """Count forward and backward passes."""
        for kind in self.passes:
            self.passes[kind] += passes

    def all_reduce_mean(self, *others: Tensor) -> list[Tensor]:
        """Average the accumulated gradients over the processes, and return the means of `others`.

        Gradients that a topology without hooks has recorded for growth are averaged in the same all-reduce.
        """
        topology = self.topology
        growth = [] if topology is None or topology.attached else topology.growth.local()
        means = self.gradients.all_reduce_mean(self.world, self.parameters, [*growth, *others])
        if topology is not None and growth:
            topology.growth.set(means[: len(growth)])
        return means[len(growth) :]
