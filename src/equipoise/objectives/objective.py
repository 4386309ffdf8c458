"""Base classes of objectives: how a batch is prepared, and which loss is minimised on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Generator, Tensor, nn

from equipoise.errors import UserError
from equipoise.objectives.attack import PGD

Classifier = Callable[[Tensor], Tensor]
"""Images to logits: the live model, or the model at a snapshot."""


@dataclass(frozen=True)
class Objective(ABC):
    """Base class of objectives.

    A step computes `batch = prepare(model, x, y, generator)` and then `loss(model, *batch)`. Only `prepare`
    depends on the current weights (through the attack), so the loss of two models can be taken on the same
    batch. In every prepared batch, `batch[0]` holds the images whose logits `loss` returns and `batch[1]` their
    labels.
    """

    @abstractmethod
    def prepare(self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        """Prepare a batch for `loss`. The model is left unchanged.

        Args:
            model: The model at its current weights.
            x: Images.
            y: Labels.
            generator: The only source of random numbers; `None` for torch's own.

        Returns:
            The arguments of `loss` after the model.
        """

    @abstractmethod
    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over a prepared batch, and the logits that accuracy is computed from.

        Args:
            model: The model, or a function that returns its logits.
            batch: What `prepare` returned.
        """

    @property
    def attack_passes(self) -> int:
        """Number of forward-backward passes over the batch in `prepare`."""
        return 0

    @property
    def loss_passes(self) -> int:
        """Number of forward passes over the batch in `loss`, each followed by a backward pass."""
        return 1


@dataclass(frozen=True)
class AdversarialObjective(Objective):
    """Base class of objectives that attack the current model once per step.

    Args:
        eps: Radius of the perturbation.
        step_size: Step size of the attack.
        steps: Number of steps of the attack.
        norm: "linf" or "l2".
    """

    eps: float = 8 / 255
    step_size: float = 2 / 255
    steps: int = 10
    norm: str = "linf"

    start: ClassVar[str] = "uniform"
    attack_loss: ClassVar[str] = "ce"

    def __post_init__(self) -> None:
        _ = self.attack  # raises on wrong settings here rather than in the first step

    @cached_property
    def attack(self) -> PGD:
        """The attack that `prepare` runs."""
        return PGD(self.norm, self.eps, self.step_size, self.steps, start=self.start, loss=self.attack_loss)

    @property
    def attack_passes(self) -> int:
        return self.attack.passes


@dataclass(frozen=True)
class DivergenceObjective(AdversarialObjective):
    """Base class of objectives with a divergence β·KL between the predictions of clean and adversarial images."""

    beta: float = 1.0

    start: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 0:
            raise UserError(f"beta must be at least 0, not {self.beta}")

    @property
    def loss_passes(self) -> int:
        return 2
