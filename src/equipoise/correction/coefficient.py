"""The coefficient c of a correction: its options, and its running estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.catalogue import Catalogue
from equipoise.correction.state import Check, Stateful, count, number, optional, tensor
from equipoise.errors import UserError

Weight = float | Tensor  # one number, or one per parameter


class CoefficientOptions:
    """Base of the coefficient options: each is a frozen dataclass that makes the coefficient of a run."""

    def make(self) -> Coefficient:
        raise NotImplementedError


CoefficientChoice = str | Mapping[str, Any] | CoefficientOptions  # how users choose one


@dataclass(frozen=True)
class Fixed(CoefficientOptions):
    """A constant c = `value`; c = 1 is SVRG.

    Args:
        value: c.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        _check_finite("value", self.value)

    def make(self) -> Coefficient:
        return ScheduledCoefficient(self.value, self.value)


@dataclass(frozen=True)
class Linear(CoefficientOptions):
    """c falls linearly from `start` to 0 over training (alpha-SVRG, Yin et al. 2023).

    Args:
        start: c at the start of training.
    """

    start: float = 0.75

    def __post_init__(self) -> None:
        _check_finite("start", self.start)

    def make(self) -> Coefficient:
        return ScheduledCoefficient(self.start, 0.0)


@dataclass(frozen=True, kw_only=True)
class Loss(CoefficientOptions):
    """c estimated from batch losses at the old and the new weights, as in AGENT (Lei et al. 2024).

    Args:
        smoothing: α of the moving average of c.
        clamp: Keep the estimate of c in [0, 1], the range given in the paper. The published code does not clamp.
        batch_fraction: Fraction of the batches of a full pass whose losses are compared. By default all with
            `recompute`, as in the paper, and a tenth with `replay`; at least 8 batches in both cases.
    """

    smoothing: float = 0.3
    clamp: bool = True
    batch_fraction: float | None = None

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)
        if self.batch_fraction is not None and not 0 < self.batch_fraction <= 1:
            raise UserError(f"batch_fraction={self.batch_fraction} must be above 0 and at most 1")

    def make(self) -> LossCoefficient:
        return LossCoefficient(self)


@dataclass(frozen=True, kw_only=True)
class Gradient(CoefficientOptions):
    """c estimated from the batch gradients of the steps: the minimum of the variance.

    Args:
        memory: β of the moving average over steps.
        per_layer: Estimate one c per parameter instead of one for all.
        clamp: Keep c in [0, 1].
    """

    memory: float = 0.95
    per_layer: bool = False
    clamp: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise UserError(f"memory={self.memory} must be at least 0 and below 1, such as 0.95")

    def make(self) -> GradientCoefficient:
        return GradientCoefficient(self)


@dataclass(frozen=True, kw_only=True)
class AsPublished(CoefficientOptions):
    """c of the published code of AGENT, for comparisons with it only: a schedule, not an estimate.

    That code copies the model right before it compares the losses of model and copy, so ĉ is always 1 and
    c = 1 - (1-α)^e in epoch e, counted from 0.

    Args:
        smoothing: α of the moving average of c.
    """

    smoothing: float = 0.3

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)

    def make(self) -> PublishedCoefficient:
        return PublishedCoefficient(self)


COEFFICIENTS: Catalogue[type[CoefficientOptions]] = Catalogue(
    "coefficient",
    {"fixed": Fixed, "linear": Linear, "loss": Loss, "gradient": Gradient, "as_published": AsPublished},
)


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise UserError(f"{name}={value} must be a finite number, such as 1")


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise UserError(f"smoothing={smoothing} must be between 0 and 1")


class Coefficient(Stateful):
    """The running value of c.

    A step uses the value that is known before its batch is drawn. A value that depended on the batch would bias the
    corrected gradient.
    """

    needs_losses = False  # pairs of batch losses at the new and the old weights, once per refresh
    needs_gradients = False  # pairs of batch gradients, at every step

    def value(self, progress: float) -> Weight:
        """Return c for the next step; `progress` is the fraction of the training steps that were taken."""
        raise NotImplementedError

    def observe_losses(self, new: Tensor, old: Tensor) -> None:
        """Update the estimate from the losses of the same batches at the live weights and at the snapshot."""

    def observe_gradients(self, new: Tensor, old: Tensor, sizes: list[int], noise: float = 0.0) -> None:
        """Update the estimate from g_new - g̃ and g_old - g̃ of one batch, zero at weights that are not corrected.

        `sizes` are the entries per parameter. `noise` is the fraction of ‖g_old - g̃‖² due to the noise of g̃.
        """

    def restart(self, layers: int) -> None:
        """Discount what was learned about the previous snapshot; `layers` parameters are corrected from now on."""

    def report(self) -> dict[str, Tensor | float]:
        return {}


class ScheduledCoefficient(Coefficient):
    """c changes linearly from `start` at the first step to `end` at the last one."""

    def __init__(self, start: float, end: float) -> None:
        self._start, self._end = start, end

    def value(self, progress: float) -> Weight:
        return self._end + (self._start - self._end) * max(0.0, 1.0 - progress)


class LossCoefficient(Coefficient):
    """ĉ = Cov(l(B|θ), l(B|θ̃)) / Var(l(B|θ̃)) over batch losses, c ← (1-α)c + α·ĉ, c₀ = 0."""

    needs_losses = True
    saved: ClassVar[Mapping[str, Check]] = {"c": number, "estimate": optional(number)}

    def __init__(self, options: Loss) -> None:
        self._options = options
        self.c = 0.0
        self.estimate: float | None = None  # ĉ

    def value(self, progress: float) -> Weight:
        return self.c

    def observe_losses(self, new: Tensor, old: Tensor) -> None:
        new, old = new.double(), old.double()
        if len(old) < 2:
            return
        variance = float(old.var(correction=1))
        covariance = float(((new - new.mean()) * (old - old.mean())).sum() / (len(old) - 1))
        if variance == 0 or not math.isfinite(covariance / variance):
            return  # equal losses, or losses that overflow at the snapshot, give no estimate
        estimate = covariance / variance
        self.estimate = min(max(estimate, 0.0), 1.0) if self._options.clamp else estimate
        self.c = (1 - self._options.smoothing) * self.c + self._options.smoothing * self.estimate

    def report(self) -> dict[str, Tensor | float]:
        return {"c": self.c} if self.estimate is None else {"c": self.c, "c_hat": self.estimate}


class PublishedCoefficient(Coefficient):
    """c ← (1-α)c + α at every refresh but the first one, c₀ = 0."""

    saved: ClassVar[Mapping[str, Check]] = {"c": number, "refreshes": count}

    def __init__(self, options: AsPublished) -> None:
        self._smoothing = options.smoothing
        self.c = 0.0
        self.refreshes = 0

    def value(self, progress: float) -> Weight:
        return self.c

    def restart(self, layers: int) -> None:
        if self.refreshes:
            self.c = (1 - self._smoothing) * self.c + self._smoothing
        self.refreshes += 1

    def report(self) -> dict[str, Tensor | float]:
        return {"c": self.c}


class GradientCoefficient(Coefficient):
    """c* = Cov(g_new, g_old) / Var(g_old), the minimum of the variance of the corrected gradient.

    E⟨g_new - g̃, g_old - g̃⟩ and E‖g_old - g̃‖² are moving averages over steps in which the newest step has weight
    1-β, and plain means of the first 1/(1-β) steps. c therefore follows the age of the snapshot within an epoch.
    """

    needs_gradients = True
    saved: ClassVar[Mapping[str, Check]] = {"steps": count, "moments": optional(tensor(2, -1))}

    def __init__(self, options: Gradient) -> None:
        self._options = options
        self.steps = 0
        self.moments: Tensor | None = None  # [2, layers or 1]: covariance, variance

    def coefficients(self) -> Tensor | None:
        """Return one c, or one per parameter; None before the first step."""
        if self.moments is None:
            return None
        covariance, variance = self.moments
        c = torch.where(variance > 0, covariance / variance, 0.0)
        return c.clamp(0, 1) if self._options.clamp else c

    def from_moments(self, covariance: float, variance: float) -> float:
        """Return the c that these moments give, without the moving average."""
        c = covariance / variance if variance > 0 else 0.0
        return min(max(c, 0.0), 1.0) if self._options.clamp else c

    def value(self, progress: float) -> Weight:
        c = self.coefficients()
        if c is None:
            return 0.0
        return c if self._options.per_layer else c[0]

    def observe_gradients(self, new: Tensor, old: Tensor, sizes: list[int], noise: float = 0.0) -> None:
        parts = sizes if self._options.per_layer else [len(old)]
        pairs = zip(new.split(parts), old.split(parts), strict=True)
        moments = torch.stack([torch.stack([a.dot(b), b.dot(b)]) for a, b in pairs], dim=1)
        moments[0] -= noise * moments[1]  # both sides are centred on g̃, so its noise looks like covariance
        if self.moments is None:
            self.moments, self.steps = torch.zeros_like(moments), 0
        self.steps += 1
        newest = max(1 - self._options.memory, 1 / self.steps)
        # An overflow, which loss scaling can cause, would never leave the average.
        self.moments = torch.where(moments.isfinite().all(), self.moments.lerp(moments, newest), self.moments)

    def restart(self, layers: int) -> None:
        """Keep the average over the previous snapshot's steps as one observation."""
        self.steps = min(self.steps, 1)
        if self._options.per_layer and self.moments is not None and self.moments.shape[1] != layers:
            self.moments = None  # parameters were frozen or unfrozen

    def report(self) -> dict[str, Tensor | float]:
        c = self.coefficients()
        return {} if c is None else {"c": c.mean()}
