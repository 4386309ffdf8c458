"""Statistics of the corrected steps of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StepStatistics:
    """Sums over the corrected steps since the last report; they stay on the device until the report.

    The variance of a gradient over the steps is E‖g‖² - ‖E g‖², for the batch gradient and for the corrected one.
    Their ratio is the variance left. Both contain the drift of the mean over the epoch. E g is a mean over steps with
    the same masks: a change of the masks begins a new segment, and the variances of the segments are pooled.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._made_at = 0  # topology updates before the present segment
        self._segment = 0  # steps of the present segment
        # Over all steps: w, ‖correction‖, ‖new‖² and ‖corrected‖²; the last two less n·‖mean‖² of ended segments.
        self._scalars: Tensor | None = None
        self._sums: Tensor | None = None  # [2, size], over the present segment: batch gradient, correction

    def observe(self, new: Tensor, delta: Tensor, weight: Tensor, made_at: int) -> None:
        """Add one step: its batch gradient, its correction, its mean weight, and `made_at` of their vector."""
        norm, cross = delta.dot(delta), new.dot(delta)
        square = new.dot(new)
        scalars = torch.stack([weight.to(new.dtype), norm.sqrt(), square, square + 2 * cross + norm])
        if self._sums is None or self._made_at != made_at or self._sums.shape[1] != len(new):
            self._end_segment()
            self._made_at, self._sums = made_at, new.new_zeros(2, len(new))
        self._sums[0] += new
        self._sums[1] += delta
        self._scalars = scalars if self._scalars is None else self._scalars + scalars
        self._segment += 1
        self.steps += 1

    def _end_segment(self) -> None:
        if self._sums is not None and self._scalars is not None and self._segment:
            new, delta = self._sums
            centres = torch.stack([new.dot(new), (new + delta).dot(new + delta)]) / self._segment
            self._scalars = torch.cat([self._scalars[:2], self._scalars[2:] - centres])
        self._sums, self._segment = None, 0

    def report(self) -> dict[str, float]:
        """Return the mean weight, the mean norm of the correction and the variance left; reset the sums."""
        self._end_segment()
        steps, scalars = self.steps, self._scalars
        self.steps, self._scalars = 0, None
        if scalars is None:
            return {"corrected_steps": 0.0}
        weight, norm, variance, left = scalars.tolist()
        result = {"corrected_steps": float(steps), "weight": weight / steps, "correction_norm": norm / steps}
        if steps > 1 and variance > 0:
            result["variance_left"] = left / variance
        return result

    def state_dict(self) -> dict[str, Any]:
        counts = [self.steps, self._made_at, self._segment]
        return {"counts": counts, "scalars": self._scalars, "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._made_at, self._segment = state["counts"]
        self._scalars, self._sums = state["scalars"], state["sums"]
