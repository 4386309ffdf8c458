"""What the adversarial objectives share: the attack their batches are made with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from equipoise.objectives.attack import PGD
from equipoise.objectives.objective import Objective


@dataclass(frozen=True)
class Adversarial(Objective):
    """An objective that attacks the current model once a step: 10 steps of 2/255 within L∞ 8/255."""

    eps: float = 8 / 255
    step_size: float = 2 / 255
    steps: int = 10
    norm: str = "linf"

    start: ClassVar[str] = "uniform"
    attack_loss: ClassVar[str] = "ce"

    def __post_init__(self) -> None:
        _ = self.attack  # wrong settings are an error here, not at the first step

    @cached_property
    def attack(self) -> PGD:
        """The attack behind `prepare`."""
        return PGD(self.norm, self.eps, self.step_size, self.steps, start=self.start, loss=self.attack_loss)

    @property
    def attack_passes(self) -> int:
        return self.attack.passes
