"""Mixed training: one half of each batch is clean, the other adversarial."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from equipoise.objectives.objective import AdversarialObjective, Classifier
from equipoise.objectives.standard import Standard


@dataclass(frozen=True)
class Mixed(AdversarialObjective):
    """Cross-entropy on batches whose first half is clean and whose second half is adversarial.

    Goodfellow et al. 2015 (arXiv:1412.6572) average the two losses of every image. Here each image has one of
    them, so that the attack costs half as much and BatchNorm sees one batch. In a batch of odd size, the
    adversarial part is the larger one.
    """

    @property
    def attack_passes(self) -> int:
        return -(-self.attack.passes // 2)  # each pass is over half of the batch; rounded up

    def prepare(self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        half = len(x) // 2
        adversarial = self.attack.perturb(model, x[half:], y[half:], generator)
        return torch.cat([x[:half], adversarial]), y

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        return Standard().loss(model, *batch)
