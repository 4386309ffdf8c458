"""SR-STE: train dense latent weights through their projection on a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.masked import ACTIVE, DROPPED
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm, DenseGradient
from equipoise.topology.latent import Latent, recorded_gradient
from equipoise.topology.pattern import Pattern, parse_pattern


@dataclass(frozen=True, kw_only=True)
class SRSTE(Algorithm):
    """SR-STE (Zhou et al. 2021): dense latent weights, of which every pass uses the largest of each group.

    The model computes with w̃ = mask⊙w; the mask has the largest |w| that the pattern allows. The gradient at w̃ is
    used for all latent weights w (straight-through), and those that are not in use decay:
    w ← w - η·(g(w̃) + λ·(1-mask)⊙w). The mask is renewed after every step. Any optimizer makes the step; its momentum
    and weight decay are those of the latent weights.

    The parameters hold w̃, so that the model has the pattern at any time, and the topology holds w: one more dense
    tensor, which a checkpoint stores. Clipping sees the gradient of the active weights and scales that of the others
    by the same factor. A gradient correction corrects the active weights. Masked storage only.

    Args:
        decay: λ, the decay of weights that are not in use; λ·w is added to their gradient.
    """

    sparsity: float = 0.5
    pattern: str = "2:4"
    initial_mask: Literal["nonzeros", "random", "largest"] = field(default="largest", init=False)
    decay: float = 2e-4

    dense_gradient: ClassVar[DenseGradient] = "always"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern:
            raise UserError('pattern="": SR-STE projects on a pattern, such as "2:4"')
        if self.decay < 0:
            raise UserError(f"decay={self.decay}: λ of λ·(1-mask)⊙w must not be negative")

    def packing_obstacle(self) -> str:
        return "SR-STE trains the inactive weights too"


class LatentWeights(Latent):
    """The latent weights of SR-STE, which are the `memory` of the sparse weights.

    Nothing here reads a value from the device, so that a CUDA graph can capture `project`.

    Args:
        algorithm: SR-STE.
        layers: The sparse weights, not yet masked.
    """

    def __init__(self, algorithm: SRSTE, layers: Sequence[SparseWeight]) -> None:
        super().__init__(layers)
        pattern = parse_pattern(algorithm.pattern)
        assert pattern is not None
        self._pattern: Pattern = pattern
        self._decay = algorithm.decay
        for layer in self._layers:
            layer.memory = layer.parameter.detach().clone()

    @torch.no_grad()
    def lift(self, ratio: Tensor | None, loss_scale: Tensor | None) -> None:
        for layer in self._layers:
            on, weight, latent = layer.mask(), layer.parameter.detach(), layer.memory
            assert latent is not None
            # An active weight is taken from the parameter, which a user may have changed.
            weight.copy_(torch.where(on, weight, latent))
            if layer.stepped.grad is None:
                continue
            gradient, inactive = layer.view(layer.stepped.grad), self._decay * weight
            if loss_scale is not None:
                inactive = inactive * loss_scale.to(inactive)
            recorded = recorded_gradient(layer, gradient, ratio)
            if recorded is not None:
                inactive = inactive + recorded
            gradient.copy_(torch.where(on, gradient, inactive))

    @torch.no_grad()
    def project(self) -> None:
        for layer in self._layers:
            weight = layer.parameter.detach()
            assert layer.memory is not None
            layer.memory.copy_(weight)
            on = self._pattern.largest_mask(weight.abs().reshape(-1), layer.final, weight.shape)
            activity = layer.activity
            activity.copy_(torch.where(on, ACTIVE, activity.masked_fill(activity == ACTIVE, DROPPED)))
            layer.hide_inactive(weight)
