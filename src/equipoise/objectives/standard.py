"""Standard training: cross-entropy on clean images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from equipoise.errors import UserError
from equipoise.objectives.attack import at_least_float32
from equipoise.objectives.objective import Classifier, Objective


@dataclass(frozen=True)
class Standard(Objective):
    """Cross-entropy on clean images.

    Args:
        label_smoothing: At least 0 and below 1; usually 0.1 for ImageNet and 0 otherwise.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, not {self.label_smoothing}")

    def prepare(self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        return x, y

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = model(x)
        return F.cross_entropy(at_least_float32(logits), y, label_smoothing=self.label_smoothing), logits
