"""Learning rate schedules: pure functions of the step, without state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of the schedules.

    Args:
        warmup: Epochs over which the learning rate rises linearly, or a fraction of the training if below 1.
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise UserError(f"warmup={self.warmup}: a number of epochs or a fraction of the training, at least 0")

    def factor(self, step: int, epochs: int, steps_per_epoch: int) -> float:
        """Return the factor of the initial learning rate at a step, counted from 0."""
        epoch = step / steps_per_epoch
        warmup = self.warmup_epochs(epochs)
        rise = min(1.0, (step + 1) / (warmup * steps_per_epoch)) if warmup else 1.0
        return rise * self.shape(epoch, epochs)

    def warmup_epochs(self, epochs: int) -> float:
        """Return the length of the warm-up in epochs."""
        return self.warmup * epochs if self.warmup < 1 else self.warmup

    def shape(self, epoch: float, epochs: int) -> float:
        """Return the factor without warm-up at a fractional epoch."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same learning rate throughout."""


@dataclass(frozen=True, kw_only=True)
class Piecewise(Schedule):
    """Falls to the given factors at the milestones; by default x0.1 at 50 % and x0.01 at 75 % (ITOP).

    Args:
        milestones: Epochs, or fractions of the training if below 1, in increasing order.
        factors: Factors of the initial learning rate, one per milestone.
    """

    milestones: tuple[float, ...] = (0.5, 0.75)
    factors: tuple[float, ...] = (0.1, 0.01)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.milestones) != len(self.factors):
            raise UserError(f"{len(self.milestones)} milestones and {len(self.factors)} factors: one per milestone")
        if list(self.milestones) != sorted(self.milestones):
            raise UserError(f"milestones={list(self.milestones)}: must increase")
        if any(number < 0 for number in (*self.milestones, *self.factors)):
            raise UserError("milestones and factors must be at least 0")

    def shape(self, epoch: float, epochs: int) -> float:
        current = 1.0
        for milestone, factor in zip(self.milestones, self.factors, strict=True):
            # 0.55 * 100 is slightly more than 55
            if epoch >= (milestone * epochs * (1 - 1e-12) if milestone < 1 else milestone):
                current = factor
        return current


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Falls by half a cosine to `end` of the initial learning rate.

    Args:
        end: The last factor of the initial learning rate.
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end < 0:
            raise UserError(f"end={self.end}: a factor of the learning rate, at least 0")

    def shape(self, epoch: float, epochs: int) -> float:
        start = min(self.warmup_epochs(epochs), epochs)
        progress = min(max((epoch - start) / max(epochs - start, 1e-9), 0.0), 1.0)
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class Fast(Cosine):
    """Cosine after a linear warm-up over 1/6 of the training, for short budgets."""

    warmup: float = 1 / 6


SCHEDULES: Catalogue[type[Schedule]] = Catalogue(
    "schedule",
    {"constant": Constant, "piecewise": Piecewise, "cosine": Cosine, "fast": Fast},
    group="schedules",
    base=Schedule,
)
