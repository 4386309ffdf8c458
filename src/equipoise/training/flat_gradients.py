"""Gradients of a correction in one flat vector, computed by passes that an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.gradients import Gradients
from equipoise.storage.flat import FlatParameters
from equipoise.topology import Topology
from equipoise.training.passes import Passes
from equipoise.world import World


class FlatActiveVector(ActiveVector):
    """An active vector of parameters that are views of one vector: one kernel gathers or scatters it.

    Args:
        flat: The layout of the parameters.
        parameters: The parameters that are corrected, in the order of the vector.
        topology: The topology of the model.
        every_index: Keep the inactive weights too.
    """

    def __init__(
        self,
        flat: FlatParameters,
        parameters: Sequence[nn.Parameter],
        topology: Topology | None,
        every_index: bool = False,
    ) -> None:
        self._flat = flat
        super().__init__(parameters, topology, every_index)
        self.used = set(range(len(self.parameters)))

    def _set_indices(self, indices: list[Tensor | None], made_at: int) -> None:
        super()._set_indices(indices, made_at)
        positions = [self._flat.positions(p) for p in self.parameters]
        pairs = zip(positions, indices, strict=True)
        self.positions = torch.cat([p if index is None else p.index_select(0, index) for p, index in pairs])


class FlatGradients(Gradients):
    """Computes gradients into the flat vector of a model; each pass overwrites them.

    Args:
        passes: Runs the model.
        flat: The layout of parameters and gradients.
    """

    def __init__(self, passes: Passes, flat: FlatParameters) -> None:
        self._passes, self._flat = passes, flat

    def active_vector(
        self, parameters: Sequence[nn.Parameter], topology: Topology | None, every_index: bool = False
    ) -> FlatActiveVector:
        return FlatActiveVector(self._flat, parameters, topology, every_index)

    def loss(self, loss_fn: Any, model: nn.Module, batch: Any, at_snapshot: bool = False) -> Tensor:
        (ref,) = batch
        return self._passes.evaluate(ref, at_snapshot)

    def differentiate(
        self, loss_fn: Any, model: nn.Module, batch: Any, vector: ActiveVector, at_snapshot: bool = False
    ) -> tuple[Tensor, Tensor]:
        (ref,) = batch
        return self._passes.differentiate(ref, at_snapshot), self.read(vector)

    def backward(self, loss_fn: Any, model: nn.Module, batch: Any, scale: float, topology: Topology | None) -> Tensor:
        (ref,) = batch
        recorded = topology is not None and topology.growth.recorded
        loss = self._passes.differentiate(ref, at_snapshot=False, hide=topology is not None and not recorded)
        if topology is not None and recorded:
            topology.take_gradients()
        return loss

    def is_empty(self, parameters: Sequence[nn.Parameter]) -> bool:
        return True

    def read(self, vector: ActiveVector) -> Tensor:
        assert isinstance(vector, FlatActiveVector)
        return self._flat.gradient.index_select(0, vector.positions)

    @torch.no_grad()
    def add(self, vector: ActiveVector, delta: Tensor) -> None:
        assert isinstance(vector, FlatActiveVector)
        self._flat.gradient.index_add_(0, vector.positions, delta.to(self._flat.gradient.dtype))

    @torch.no_grad()
    def all_reduce_mean(
        self, world: World, parameters: Sequence[nn.Parameter], others: Sequence[Tensor]
    ) -> list[Tensor]:
        if world.alone:
            return list(others)
        mean, *means = world.all_reduce_mean([self._flat.gradient, *others])
        self._flat.gradient.copy_(mean)
        return [each.clone() for each in means]  # a view of the loss would keep the whole bucket alive
