"""Mixed training: each batch half clean, half adversarial."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.objectives.adversarial import Adversarial
from equipoise.objectives.objective import Classifier
from equipoise.objectives.standard import Standard


@dataclass(frozen=True)
class Mixed(Adversarial):
    """Cross-entropy on batches whose first half is clean and whose second half is adversarial.

    Goodfellow et al. 2015 (arXiv:1412.6572) mix the two losses half and half; here the images are mixed, so
    that the attack costs half as much and BatchNorm sees one batch. Of an odd batch, one more is attacked.
    """

    @property
    def attack_passes(self) -> int:
        return -(-self.attack.passes // 2)  # over half of the batch; in whole ones, rounded up

    def prepare(
        self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        half = len(x) // 2
        adversarial = self.attack.perturb(model, x[half:], y[half:], generator)
        return torch.cat([x[:half], adversarial]), y

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        return Standard().loss(model, *batch)
