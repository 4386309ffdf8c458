"""The gradients of inactive weights that growth looks at, from one optimizer step to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.shards import is_sharded, local
from equipoise.storage.masked import MaskedWeight
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm
from equipoise.world import World

TOLERANCE = 1e-3  # relative difference of gradients that are equal except for rounding


class GrowthGradients:
    """Records the gradients of all weights, active or not, during steps whose growth needs them.

    Args:
        algorithm: Says at which steps it needs them.
        layers: The sparse weights.
        world: The processes that train the model together.

    Attributes:
        recorded: Whether the gradients of the next step are recorded.
        corrected: Whether growth uses the corrected gradient instead of the batch gradient.
    """

    def __init__(self, algorithm: Algorithm, layers: Sequence[SparseWeight], world: World) -> None:
        self._needed = algorithm.dense_gradient
        self._layers = layers
        self._world = world
        self._sharded = any(is_sharded(layer.parameter) for layer in layers)
        self.recorded = False
        self.corrected = getattr(algorithm, "growth", "batch") == "corrected"

    def begin_step(self, update: bool) -> None:
        """Forget the gradients of the last step and record those of the next one, if it needs them.

        Args:
            update: Whether the next step is an update step.
        """
        self.recorded = self._needed == "always" or (self._needed == "at updates" and update)
        for layer in self._layers:
            layer.record_growth(self.recorded)

    def stop(self) -> None:
        """Stop recording."""
        for layer in self._layers:
            layer.record_growth(False)

    def take(self) -> None:
        """Record `.grad` of masked weights before it is masked, for loops without hooks."""
        for layer in self._layers if self.recorded else ():
            if isinstance(layer, MaskedWeight) and layer.stepped.grad is not None:
                layer.growth_recorder.add(layer.view(layer.stepped.grad), restart=True)

    @torch.no_grad()
    def add(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        """Add a correction of all weights, for growth by the corrected gradient."""
        parts = {id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)}
        for layer in self._layers:
            if layer.growth is not None and id(layer.parameter) in parts:
                layer.growth = layer.growth + parts[id(layer.parameter)]

    def scale(self) -> Tensor | None:
        """Norm of the recorded gradients at active weights, divided by the norm of `.grad`, unscaled or clipped since.

        It is 1 if `.grad` is not a multiple of what was recorded, such as after a correction.
        """
        layers = [layer for layer in self._layers if layer.growth is not None and layer.parameter.grad is not None]
        if not layers:
            return None
        recorded = [_active_growth(layer) for layer in layers]
        applied = [local(layer.parameter.grad).reshape(-1) for layer in layers if layer.parameter.grad is not None]
        norm = self._norm(recorded)
        ratio = norm / self._norm(applied)
        rest = self._norm([r - ratio.to(r) * a for r, a in zip(recorded, applied, strict=True)])
        is_multiple = rest < TOLERANCE * norm
        return torch.where(is_multiple & ((ratio - 1).abs() > TOLERANCE), ratio, 1.0)

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norm of all tensors together, with their shards on other processes."""
        norms = [tensor.norm() for tensor in tensors]
        norm = torch.stack([norm.to(norms[0]) for norm in norms]).norm()
        return self._world.all_reduce(norm.square()).sqrt() if self._sharded else norm

    def local(self) -> list[Tensor]:
        """The tensors to average over the processes: the recorded gradient of each weight, and which of them exist.

        Empty in a single process, if the next step needs none, and for sharded weights, whose gradients are means.
        """
        if self._world.alone or self._sharded or not self.recorded:
            return []
        found = [torch.zeros(layer.mask().shape) if layer.growth is None else layer.growth for layer in self._layers]
        found = [tensor.to(layer.parameter) for tensor, layer in zip(found, self._layers, strict=True)]
        known = found[0].new_tensor([float(layer.growth is not None) for layer in self._layers])
        return [*found, known]

    def set(self, means: Sequence[Tensor]) -> None:
        """Replace the recorded gradients by the means of `local` over the processes."""
        *growth, fractions = means
        for layer, mean, fraction in zip(self._layers, growth, fractions.tolist(), strict=True):
            if fraction > 0:
                layer.growth = mean

    def all_reduce(self) -> None:
        """Average the recorded gradients over the processes."""
        if found := self.local():
            self.set(self._world.all_reduce_mean(found))


def _active_growth(layer: SparseWeight) -> Tensor:
    """The recorded gradient in the layout of the parameter, zero at inactive weights."""
    assert layer.growth is not None
    if layer.index is not None:
        return layer.growth.reshape(-1)[layer.index.long()]
    kept = layer.growth.clone()
    layer.hide_inactive(kept)
    return kept.reshape(-1)
