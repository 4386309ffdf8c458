"""HYDRA: pretrain a dense model, learn a score for each weight, and fine-tune the weights with the best scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.masked import ACTIVE, DROPPED
from equipoise.storage.sparse_weight import SparseWeight, highest
from equipoise.topology.algorithm import Algorithm, DenseGradient
from equipoise.topology.distribution import Distribution, Shapes
from equipoise.topology.latent import Latent, recorded_gradient
from equipoise.topology.schedule import Window


@dataclass(frozen=True, kw_only=True)
class Hydra(Algorithm):
    """HYDRA (Sehwag et al. 2020): pretrain dense, learn which weights to keep with the loss itself, fine-tune those.

    Training has three phases. Until `begin` the model is dense. Until `until` its weights w are frozen and every weight
    has a score, which starts at s = sqrt(6/fan_in)·w/max|w|. The model computes with mask⊙w; the mask has the largest
    |s| of each layer. From the gradient g of mask⊙w the scores get the gradient g⊙w⊙sign(s) (straight-through), and the
    optimizer steps them like weights. Then the mask stays, and the kept weights are trained on. Momentum starts at zero
    in every phase. The learning rates of the phases are those of the schedule, such as `piecewise`.

    Biases of sparse layers train in all phases; the authors' code freezes them while scores are learned. The first of
    these steps has the gradient of the dense model, which is scored once more before it is pruned. Scores and frozen
    weights take two more dense tensors while scores are learned, and a checkpoint stores them. Masked storage only.

    Args:
        distribution: `uniform`, as published: every layer has the same sparsity.
        begin: Fraction of the training after which scores are learned. 0 prunes a model that is already trained.
        until: Fraction of the training after which the kept weights are fine-tuned. The defaults are those of the
            paper: 100, 20 and 100 epochs.
    """

    distribution: Distribution = "uniform"
    begin: float = 5 / 11
    until: float = 6 / 11

    dense_gradient: ClassVar[DenseGradient] = "at updates"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_fan_in:
            raise UserError(f"min_fan_in={self.min_fan_in}: HYDRA keeps the best scores of a layer and no minimum")
        Window(1, self.begin, self.until, 1)

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        return {name: math.prod(shape) for name, shape in shapes.items()}

    def window(self, total_steps: int | None) -> Window:
        """The steps at which scores are learned."""
        if total_steps is None:
            raise UserError("Hydra needs total_steps, the number of optimizer steps, in attach()")
        window = Window(1, self.begin, self.until, total_steps)
        if not window.last_update:
            raise UserError(
                f"begin={self.begin}, until={self.until}: no step of {total_steps} learns scores, so nothing would be "
                "pruned; train longer"
            )
        return window

    def pattern_obstacle(self) -> str:
        return "HYDRA keeps single weights; use sr-ste"

    def packing_obstacle(self) -> str:
        return "HYDRA learns scores of all weights"


class LearnedScores(Latent):
    """The frozen weights and the scores of HYDRA: the `memory` of the sparse weights while scores are learned.

    Args:
        layers: The sparse weights.
        optimizer: Its momentum restarts in every phase.
    """

    def __init__(self, layers: Sequence[SparseWeight], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(layers)
        self._optimizer = optimizer

    @torch.no_grad()
    def lift(self, ratio: Tensor | None, loss_scale: Tensor | None) -> None:
        """Set the parameters to the scores. Their gradient is proportional to that of the weights at any loss scale."""
        for layer in self._layers:
            value = layer.parameter.detach()
            if layer.memory is None:  # the first step that learns scores
                layer.memory = torch.stack([value, initial_scores(value)])
                self._restart(layer)
            weight, score = layer.memory
            if layer.stepped.grad is not None:
                gradient = layer.view(layer.stepped.grad)
                recorded = recorded_gradient(layer, gradient, ratio)
                if recorded is not None:
                    gradient.copy_(torch.where(layer.mask(), gradient, recorded))
                gradient.mul_(weight * score.sign())
            value.copy_(score)

    @torch.no_grad()
    def project(self) -> None:
        for layer in self._layers:
            assert layer.memory is not None
            weight, score = layer.memory
            score.copy_(layer.parameter.detach())
            best = highest(score.abs().reshape(-1), layer.final)
            on = torch.zeros_like(score, dtype=torch.bool).view(-1).index_fill_(0, best, True).view(score.shape)
            layer.activity.copy_(torch.where(on, ACTIVE, DROPPED))  # every weight was active before
            layer.recount()
            layer.parameter.detach().copy_(torch.where(on, weight, 0))

    def finish(self) -> None:
        for layer in self._layers:
            layer.memory = None
            self._restart(layer)

    def _restart(self, layer: SparseWeight) -> None:
        for momentum in layer.states(self._optimizer):
            momentum.zero_()


def initial_scores(weight: Tensor) -> Tensor:
    """Return the scaled initialisation of the scores: sqrt(6/fan_in)·w/max|w|."""
    fan_in = math.prod(weight.shape[1:])
    return math.sqrt(6 / fan_in) * weight / weight.abs().max().clamp(min=torch.finfo(weight.dtype).tiny)
