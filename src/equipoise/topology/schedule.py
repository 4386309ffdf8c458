"""Schedules: the update steps of a topology, and the drop fraction at each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from equipoise.errors import UserError

Decay = Literal["constant", "linear", "cosine"]


def decay(kind: Decay, start: float, end: float, progress: float) -> float:
    """Return the value at a point of a schedule.

    Args:
        kind: Shape of the schedule.
        start: Value at progress 0.
        end: Value at progress 1; ignored if `constant`.
        progress: Progress in [0, 1]; values outside are clamped.
    """
    progress = min(max(progress, 0.0), 1.0)
    match kind:
        case "constant":
            return start
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
    raise UserError(f'no decay is called "{kind}"; choose from constant, linear, cosine')


def interval(every: float, total: int) -> int:
    """Return the steps between updates; `every` is this number, or a fraction of the training if below 1."""
    return int(every) if every >= 1 else max(1, round(every * total))


@dataclass(frozen=True)
class Window:
    """The update steps of a training.

    Steps count from 1. The last step of training is never an update, because weights grown by it would never be
    trained.

    Args:
        every: Steps between updates.
        begin: Fraction of the training after which updates begin.
        until: Fraction of the training after which updates end.
        total: Number of optimizer steps of the training.
    """

    every: int
    begin: float
    until: float
    total: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"every={self.every}: updates must be at least 1 step apart")
        if self.total < 1:
            raise UserError(f"total_steps={self.total}: training must have at least 1 optimizer step")
        if not 0 <= self.begin < self.until <= 1:
            raise UserError(
                f"begin={self.begin}, until={self.until}: fractions of training must be 0 <= begin < until <= 1"
            )

    @property
    def first(self) -> int:
        return round(self.begin * self.total)

    @property
    def last(self) -> int:
        return round(self.until * self.total)

    def contains(self, step: int) -> bool:
        return self.first < step < self.last and step % self.every == 0

    @property
    def last_update(self) -> int:
        """The last update step; 0 if there is none."""
        step = (self.last - 1) // self.every * self.every
        return step if self.contains(step) else 0

    def progress(self, step: int) -> float:
        """Fraction of the window that has passed at a step."""
        return (step - self.first) / max(self.last - self.first, 1)

    def completion(self, step: int) -> float:
        """Like `progress`, but exactly 1 at the last update, so that a schedule reaches its final value."""
        return (step - self.first) / max(self.last_update - self.first, 1)
