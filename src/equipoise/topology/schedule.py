"""When the topology changes, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from equipoise.errors import UserError

Decay = Literal["constant", "linear", "cosine"]


def decay(kind: Decay, start: float, end: float, progress: float) -> float:
    """The value at `progress` in [0, 1] on the way from `start` to `end`."""
    progress = min(max(progress, 0.0), 1.0)
    match kind:
        case "constant":
            return start
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
    raise UserError(f'no decay is called "{kind}"; there is constant, linear, cosine')


@dataclass(frozen=True)
class Window:
    """Update steps: every `every` steps after the share `begin` of training and before the share `until`.

    Steps count from 1. The last step of training is never an update: what it grew would never be trained.
    """

    every: int
    begin: float
    until: float
    total: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"every={self.every}: updates are at least 1 step apart")
        if self.total < 1:
            raise UserError(f"total_steps={self.total}: training has at least 1 optimizer step")
        if not 0 <= self.begin < self.until <= 1:
            raise UserError(f"begin={self.begin}, until={self.until}: shares of training, 0 <= begin < until <= 1")

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
        """The last update step, or 0 where there is none."""
        step = (self.last - 1) // self.every * self.every
        return step if self.contains(step) else 0

    def progress(self, step: int) -> float:
        """How far the window has passed, as a share."""
        return (step - self.first) / max(self.last - self.first, 1)

    def completion(self, step: int) -> float:
        """Like progress, but 1 at the last update: what has to be reached is reached."""
        return (step - self.first) / max(self.last_update - self.first, 1)
