"""BSR-Net: weights that keep their sign, rewired after every step to one global budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.bitmap import pack_bits
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.distribution import Distribution, Shapes


@dataclass(frozen=True, kw_only=True)
class BSRNet(Algorithm):
    """BSR-Net (Özdenizci & Legenstein 2021): w = s·θ with a fixed sign s; a weight is off once θ ≤ 0.

    After every step the network is refilled to its global budget. Each missing connection picks a layer with
    probability proportional to its size and a uniform inactive index in it, and starts at 1e-12. Single
    layers have no fixed budget, and momentum is not reset. A weight keeps the sign of its initial value. Signs
    take one byte for each weight. In packed storage they take one bit, and new connections start without momentum.

    Args:
        distribution: `bsr` uses BSR-Net's initial densities, which are known for vgg16, wrn_28_4 and the resnets. The
            first rewiring fills the rest of the budget.
        noise: Standard deviation of the Gaussian noise lr·N(0, noise²) on active weights at every step.
        rewire_every: Steps between rewirings, 1 as published. In between, a weight that would cross its sign stays
            at zero.
    """

    distribution: Distribution = "bsr"
    noise: float = 1e-6
    rewire_every: int = 1

    global_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 0:
            raise UserError(f"noise={self.noise}: a standard deviation must not be negative")
        if self.min_fan_in:
            raise UserError(
                f"min_fan_in={self.min_fan_in}: BSR-Net chooses weights across layers and keeps no minimum"
            )
        if self.rewire_every < 1:
            raise UserError(f"rewire_every={self.rewire_every}: rewirings must be at least 1 step apart")

    def pattern_obstacle(self) -> str:
        return "BSR-Net draws single weights; use rigl, set or granet"

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        """Initial densities that the model declares, if their sum stays within the budget."""
        final = self.final_counts(shapes, model)
        densities = getattr(model, "bsr_densities", None)
        if self.distribution != "bsr" or densities is None:
            return final
        own = densities(1 - self.sparsity)
        initial = {name: round(own[name] * math.prod(shape)) for name, shape in shapes.items()}
        return initial if sum(initial.values()) <= sum(final.values()) else final

    def bits_to_remember(self, weight: Tensor) -> Tensor:
        return pack_bits(weight.reshape(-1) >= 0)
