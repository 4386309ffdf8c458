"""Adversarial training: cross-entropy on images that were perturbed against the current model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equipoise.errors import UserError
from equipoise.objectives.attack import at_least_float32
from equipoise.objectives.objective import AdversarialObjective, Classifier

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class AdversarialTraining(AdversarialObjective):
    """Cross-entropy on PGD images from a uniform start (Madry et al. 2018, arXiv:1706.06083).

    loss = (1 − f)·CE(adversarial) + f·CE(clean) with f = `clean_fraction`, which is 0 in the paper.

    `clean_fraction=0.1` is the control for a correction whose full gradient comes from clean images: the same
    clean signal without a correction. As in that correction, clean images do not update BatchNorm's running
    statistics. The attack uses these statistics, and a VGG-16 at 99 % sparsity with statistics of both kinds of
    images did not learn at all.

    Args:
        clean_fraction: Weight of the clean loss, at least 0 and below 1.
    """

    clean_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clean_fraction < 1:
            raise UserError(f"clean_fraction must be at least 0 and below 1, not {self.clean_fraction}")

    @property
    def loss_passes(self) -> int:
        return 2 if self.clean_fraction else 1

    def prepare(self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        adversarial = self.attack.perturb(model, x, y, generator)
        return (adversarial, y, x) if self.clean_fraction else (adversarial, y)

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        adversarial, y, *clean = batch
        logits = model(adversarial)
        loss = F.cross_entropy(at_least_float32(logits), y)
        for x in clean:
            clean_loss = F.cross_entropy(at_least_float32(without_statistics(model, x)), y)
            loss = torch.lerp(loss, clean_loss, self.clean_fraction)
        return loss, logits


def without_statistics(model: Classifier, x: Tensor) -> Tensor:
    """Logits of `x`, computed on a copy of the running statistics.

    Restoring the statistics in place instead would invalidate tensors that the backward pass needs.
    """
    if not isinstance(model, nn.Module):
        return model(x)
    copies = {name: value.clone() for name, value in model.named_buffers() if name.endswith(STATISTICS)}
    return cast(Tensor, functional_call(model, copies, (x,)))
