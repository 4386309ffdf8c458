"""Adversarial training: cross-entropy on images perturbed against the current model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.errors import UserError
from equipoise.objective.adversarial import Adversarial
from equipoise.objective.attack import at_least_float32
from equipoise.objective.base import Classifier


@dataclass(frozen=True)
class AdversarialTraining(Adversarial):
    """Cross-entropy on PGD images from a uniform start (Madry et al. 2018, arXiv:1706.06083).

    loss = (1 − f)·CE(adversarial) + f·CE(clean), f = `clean_fraction`, 0 in the paper. With 0.1 it is the
    control for a correction whose full gradient comes from clean images: the same clean signal, no correction.
    """

    clean_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clean_fraction < 1:
            raise UserError(f"clean_fraction must be at least 0 and below 1, not {self.clean_fraction}")

    @property
    def loss_passes(self) -> int:
        return 2 if self.clean_fraction else 1

    def prepare(
        self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        adversarial = self.attack.perturb(model, x, y, generator)
        return (adversarial, y, x) if self.clean_fraction else (adversarial, y)

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        adversarial, y, *clean = batch
        logits = model(adversarial)
        loss = F.cross_entropy(at_least_float32(logits), y)
        for x in clean:
            loss = torch.lerp(loss, F.cross_entropy(at_least_float32(model(x)), y), self.clean_fraction)
        return loss, logits
