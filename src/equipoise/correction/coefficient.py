"""How related the old gradient still is: the weight c of the correction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weight = float | Tensor  # one number, or one for every parameter


class Coefficient:
    """c, smoothed where it is estimated. `value` is what the coming step uses, known before its batch is drawn."""

    needs_losses = False  # pairs of batch losses at the old and the new weights, when the snapshot is refreshed
    needs_gradients = False  # pairs of batch gradients, at every step

    def value(self, progress: float) -> Weight:
        raise NotImplementedError

    def see_losses(self, new: Tensor, old: Tensor) -> None:
        """Batch losses at the weights of now and at the previous snapshot, on the same batches."""

    def see_gradients(self, change: Tensor, scatter: Tensor, sizes: list[int], noise: float = 0.0) -> None:
        """Of one batch, g_new - g̃ and g_old - g̃ (zero where nothing is corrected), and the sizes of its layers.

        noise: the share of ‖g_old - g̃‖² that is due to what stands for g̃, where that is an estimate itself.
        """

    def restart(self, layers: int) -> None:
        """The snapshot is new: what was learnt about the age of the old one no longer holds."""

    def report(self) -> dict[str, Tensor | float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class FixedCoefficient(Coefficient):
    """The same c always; c = 1 is SVRG."""

    def __init__(self, value: float) -> None:
        self._value = value

    def value(self, progress: float) -> Weight:
        return self._value


class LinearCoefficient(Coefficient):
    """c falling linearly from `start` to 0 over training (alpha-SVRG, Yin et al. 2023)."""

    def __init__(self, start: float) -> None:
        self._start = start

    def value(self, progress: float) -> Weight:
        return self._start * max(0.0, 1.0 - progress)


class LossCoefficient(Coefficient):
    """The paper's: ĉ = Cov(l(B|θ), l(B|θ̃)) / Var(l(B|θ̃)) over batch losses, c ← (1-α)c + α·ĉ, c₀ = 0.

    ĉ is clamped to [0, 1], the range the paper gives; `clamp=False` is what its published code does.
    """

    needs_losses = True

    def __init__(self, smoothing: float, clamp: bool = True) -> None:
        self._smoothing = smoothing
        self._clamp = clamp
        self.c = 0.0
        self.estimate: float | None = None

    def value(self, progress: float) -> Weight:
        return self.c

    def see_losses(self, new: Tensor, old: Tensor) -> None:
        new, old = new.double(), old.double()
        if len(old) < 2:
            return
        variance = float(old.var(correction=1))
        covariance = float(((new - new.mean()) * (old - old.mean())).sum() / (len(old) - 1))
        if variance == 0 or not math.isfinite(covariance / variance):
            return  # nothing can be told from batches that all have one loss, or from old losses that overflow
        estimate = covariance / variance
        self.estimate = min(max(estimate, 0.0), 1.0) if self._clamp else estimate
        self.c = (1 - self._smoothing) * self.c + self._smoothing * self.estimate

    def report(self) -> dict[str, Tensor | float]:
        return {"c": self.c} if self.estimate is None else {"c": self.c, "c_hat": self.estimate}

    def state_dict(self) -> dict[str, Any]:
        return {"c": self.c, "estimate": self.estimate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.c, self.estimate = state["c"], state["estimate"]


class GradientCoefficient(Coefficient):
    """c* = Cov(g_new, g_old) / Var(g_old) from the gradients at hand: the minimum of the variance's parabola.

    E⟨g_new - g̃, g_old - g̃⟩ and E‖g_old - g̃‖² are averaged over steps, each with weight 1-β for the newest
    (a plain mean until 1/(1-β) steps are seen), so c follows the age of the snapshot inside an epoch. A step uses
    what earlier steps have shown: a c that knew its own batch would bias the estimate. One c, or one per parameter.
    """

    needs_gradients = True

    def __init__(self, memory: float = 0.95, per_layer: bool = False, clamp: bool = True) -> None:
        self._memory = memory
        self._per_layer = per_layer
        self._clamp = clamp
        self._seen = 0
        self._moments: Tensor | None = None  # [2, layers or 1]: covariance, variance

    def coefficients(self) -> Tensor | None:
        """One c, or one for every parameter; None before the first step."""
        if self._moments is None:
            return None
        covariance, variance = self._moments
        c = torch.where(variance > 0, covariance / variance, 0.0)
        return c.clamp(0, 1) if self._clamp else c

    def value(self, progress: float) -> Weight:
        c = self.coefficients()
        if c is None:
            return 0.0
        return c if self._per_layer else c[0]

    def see_gradients(self, change: Tensor, scatter: Tensor, sizes: list[int], noise: float = 0.0) -> None:
        parts = sizes if self._per_layer else [len(scatter)]
        pairs = zip(change.split(parts), scatter.split(parts), strict=True)
        found = torch.stack([torch.stack([new.dot(old), old.dot(old)]) for new, old in pairs], dim=1)
        found[0] -= noise * found[1]  # both sides are centred on g̃, so its own noise looks like covariance
        if self._moments is None:
            self._moments, self._seen = torch.zeros_like(found), 0
        self._seen += 1
        newest = max(1 - self._memory, 1 / self._seen)
        # one overflow, as loss scaling meets them, would stay in the average for ever
        self._moments = torch.where(found.isfinite().all(), self._moments.lerp(found, newest), self._moments)

    def restart(self, layers: int) -> None:
        """Forget the ages of the old snapshot but keep its last word as one observation."""
        self._seen = min(self._seen, 1)
        if self._per_layer and self._moments is not None and self._moments.shape[1] != layers:
            self._moments = None  # some were frozen or thawed

    def report(self) -> dict[str, Tensor | float]:
        c = self.coefficients()
        return {} if c is None else {"c": c.mean()}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "moments": self._moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._moments = state["seen"], state["moments"]
