"""Statistics of the corrected steps of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.correction.state import Check, Stateful, count, optional, tensor


class StepStatistics(Stateful):
    """Sums over the corrected steps since the last report; they stay on the device until the report.

    The variance of a gradient over the steps is E‖g‖² - ‖E g‖², for the batch gradient and for the corrected one.
    Their ratio is the variance left. Both contain the drift of the mean over the epoch. E g is a mean over steps with
    the same masks: a change of the masks begins a new segment, and the variances of the segments are pooled.
    """

    saved: ClassVar[Mapping[str, Check]] = {
        **dict.fromkeys(("steps", "made_at", "segment"), count),
        "scalars": optional(tensor(4)),
        "sums": optional(tensor(2, -1)),
    }

    def __init__(self) -> None:
        self.steps = 0
        self.made_at = 0  # topology updates before the present segment
        self.segment = 0  # steps of the present segment
        # Over all steps: w, ‖correction‖, ‖new‖² and ‖corrected‖²; the last two less n·‖mean‖² of ended segments.
        self.scalars: Tensor | None = None
        self.sums: Tensor | None = None  # [2, size], over the present segment: batch gradient, correction

    def observe(self, new: Tensor, delta: Tensor, weight: Tensor, made_at: int) -> None:
        """Add one step: its batch gradient, its correction, its mean weight, and `made_at` of their vector."""
        norm, cross = delta.dot(delta), new.dot(delta)
        square = new.dot(new)
        scalars = torch.stack([weight.to(new.dtype), norm.sqrt(), square, square + 2 * cross + norm])
        if self.sums is None or self.made_at != made_at or self.sums.shape[1] != len(new):
            self._end_segment()
            self.made_at, self.sums = made_at, new.new_zeros(2, len(new))
        self.sums[0] += new
        self.sums[1] += delta
        self.scalars = scalars if self.scalars is None else self.scalars + scalars
        self.segment += 1
        self.steps += 1

    def _end_segment(self) -> None:
        if self.sums is not None and self.scalars is not None and self.segment:
            new, delta = self.sums
            centres = torch.stack([new.dot(new), (new + delta).dot(new + delta)]) / self.segment
            self.scalars = torch.cat([self.scalars[:2], self.scalars[2:] - centres])
        self.sums, self.segment = None, 0

    def report(self) -> dict[str, float]:
        """Return the mean weight, the mean norm of the correction and the variance left; reset the sums."""
        self._end_segment()
        steps, scalars = self.steps, self.scalars
        self.steps, self.scalars = 0, None
        if scalars is None or not steps:
            return {"corrected_steps": 0.0}
        weight, norm, variance, left = scalars.tolist()
        result = {"corrected_steps": float(steps), "weight": weight / steps, "correction_norm": norm / steps}
        if steps > 1 and variance > 0:
            result["variance_left"] = left / variance
        return result
