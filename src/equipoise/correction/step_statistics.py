"""What the correction did in an epoch, measured on the steps themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Statistics:
    """Sums over the corrected steps since the last report; they stay on the device until it is asked for.

    The variance of a gradient over the steps is E‖g‖² - ‖E g‖², for the batch gradient and for the corrected one:
    their ratio is the variance left. Both contain the drift of the mean over the epoch. Means are of the same
    weights only: when the masks have changed a new stretch begins, and the variances of the stretches are pooled.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._masks = 0  # which masks the present stretch is of
        self._stretch = 0  # its steps
        # sums over all steps: weight, norm of the correction, ‖new‖², ‖corrected‖²; less n·‖mean‖² of past stretches
        self._scalars: Tensor | None = None
        self._sums: Tensor | None = None  # [2, coordinates], over the stretch: of new, of the correction

    def see(self, new: Tensor, delta: Tensor, weight: Tensor, masks: int) -> None:
        """One step: the batch gradient, what was added to it, the (mean) weight, and which masks there are."""
        norm, cross = delta.dot(delta), new.dot(delta)
        square = new.dot(new)
        scalars = torch.stack([weight.to(new.dtype), norm.sqrt(), square, square + 2 * cross + norm])
        if self._sums is None or self._masks != masks or self._sums.shape[1] != len(new):
            self._end_stretch()
            self._masks, self._sums = masks, new.new_zeros(2, len(new))
        self._sums[0] += new
        self._sums[1] += delta
        self._scalars = scalars if self._scalars is None else self._scalars + scalars
        self._stretch += 1
        self.steps += 1

    def _end_stretch(self) -> None:
        if self._sums is not None and self._scalars is not None and self._stretch:
            new, delta = self._sums
            centres = torch.stack([new.dot(new), (new + delta).dot(new + delta)]) / self._stretch
            self._scalars = torch.cat([self._scalars[:2], self._scalars[2:] - centres])
        self._sums, self._stretch = None, 0

    def report(self) -> dict[str, float]:
        """Mean weight applied, mean norm of the correction, share of the variance left; then start again."""
        self._end_stretch()
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
        counts = [self.steps, self._masks, self._stretch]
        return {"counts": counts, "scalars": self._scalars, "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._masks, self._stretch = state["counts"]
        self._scalars, self._sums = state["scalars"], state["sums"]
