"""Adversarial training: cross-entropy on images perturbed against the current model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equipoise.errors import UserError
from equipoise.objectives.adversarial import Adversarial
from equipoise.objectives.attack import at_least_float32
from equipoise.objectives.objective import Classifier

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class AdversarialTraining(Adversarial):
    """Cross-entropy on PGD images from a uniform start (Madry et al. 2018, arXiv:1706.06083).

    loss = (1 − f)·CE(adversarial) + f·CE(clean), f = `clean_fraction`, 0 in the paper. With 0.1 it is the
    control for a correction whose full gradient comes from clean images: the same clean signal, no correction.
    As there, clean images leave no trace in BatchNorm's running statistics. The attack sees the model through
    these, and with statistics of both kinds of images a VGG-16 at 99 % learned nothing at all.
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
            loss = torch.lerp(loss, F.cross_entropy(at_least_float32(_in_passing(model, x)), y), self.clean_fraction)
        return loss, logits


def _in_passing(model: Classifier, x: Tensor) -> Tensor:
    """The logits of `x`, with running statistics left as they are.

    By a copy of them that is thrown away: to write the old ones back is forbidden until the backward pass.
    """
    if not isinstance(model, nn.Module):
        return model(x)
    copies = {name: value.clone() for name, value in model.named_buffers() if name.endswith(STATISTICS)}
    return cast(Tensor, functional_call(model, copies, (x,)))
