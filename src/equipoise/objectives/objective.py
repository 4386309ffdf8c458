"""What an objective is: how a batch is prepared, and the loss that is then minimised on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Classifier = Callable[[Tensor], Tensor]
"""Images to logits: the live model, or the same model at a snapshot."""


@dataclass(frozen=True)
class Objective(ABC):
    """What is minimised.

    A step is `batch = prepare(model, x, y, generator)` and `loss(model, *batch)`. Preparing is what needs the
    current model (the attack), so that the loss can be taken of two models on the very same batch. Of every
    batch, `batch[0]` are the images whose logits `loss` returns, and `batch[1]` their labels.
    """

    @abstractmethod
    def prepare(
        self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """The batch to minimise on; `model` comes back as it was, and only `generator` is drawn from."""

    @abstractmethod
    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over a prepared batch, and the logits to count accuracy by."""

    @property
    def attack_passes(self) -> int:
        """Forward-backward passes over the batch that `prepare` costs."""
        return 0

    @property
    def loss_passes(self) -> int:
        """Forward passes over the batch that `loss` costs, each with its backward."""
        return 1
