"""SGD, SVRG and AGENT on a small non-convex problem, measured against the bounds of `theory`.

Everything the bounds ask for is known here (L, sigma, a lower bound of the loss) and everything else is as
Appendix A has it: batches drawn with replacement, Theorem 1's step size and epoch length, the snapshot at the
start of an epoch. All repeats of a method advance together, one row each, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.analysis.theory import Setting, setting_of_theorem
from equipoise.errors import UserError

Array = NDArray[np.float64]

METHODS: Mapping[str, str] = {
    "SGD": "no correction: c = 0",
    "SVRG": "full correction: c = 1",
    "AGENT": "gamma times the smoothed loss-based estimate, renewed every epoch",
    "optimal c": "the c of least variance at every step, from all sample gradients",
}


@dataclass(frozen=True)
class Phases:
    """Non-convex losses l_i = 1 - cos(a_i . theta - y_i): find the theta whose phases are y.

    Curved down as often as up. l_i is |a_i|^2-smooth, its gradient is at most |a_i|, and no loss is below zero.
    Parameters are rows, one for each repeat; the gradient of sample i is its slope times a_i.
    """

    features: Array
    targets: Array

    @classmethod
    def random(cls, samples: int = 200, dimensions: int = 5, noise: float = 0.5, seed: int = 0) -> Phases:
        """Unit features in random directions; targets from a random theta, with Gaussian noise on the phase."""
        rng = np.random.default_rng(seed)
        features = rng.standard_normal((samples, dimensions))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        targets = features @ (2 * rng.standard_normal(dimensions)) + noise * rng.standard_normal(samples)
        return cls(features, targets)

    @property
    def sigma(self) -> float:
        """The largest norm a sample gradient can have."""
        return float(np.linalg.norm(self.features, axis=1).max())

    @property
    def smoothness(self) -> float:
        """L of every sample's loss."""
        return self.sigma**2

    def losses(self, theta: Array) -> Array:
        """Loss of every sample, by repeat."""
        return 1 - np.cos(theta @ self.features.T - self.targets)

    def slopes(self, theta: Array) -> Array:
        """Derivative of every sample's loss along its a_i, by repeat."""
        return np.sin(theta @ self.features.T - self.targets)

    def mean_gradient(self, slopes: Array) -> Array:
        """Full gradient, by repeat."""
        return slopes @ self.features / len(self.targets)


@dataclass(frozen=True)
class Trajectory:
    """One method at the end of every epoch.

    `average` is the mean of |grad l|^2 over all steps so far and over the repeats, `spread` its standard
    deviation over the repeats, `coefficient` the mean weight of the old gradient in the epoch, `first` and
    `second` the terms of Theorem 1's bound on `average`.
    """

    steps: NDArray[np.int64]
    sample_gradients: NDArray[np.int64]
    loss: Array
    average: Array
    spread: Array
    coefficient: Array
    first: Array
    second: Array

    @property
    def bound(self) -> Array:
        """Both terms of the bound together."""
        return self.first + self.second


def trajectories(
    problem: Phases | None = None,
    *,
    mu: float = 0.25,
    alpha: float = 2 / 3,
    batch_size: int = 10,
    epochs: int = 30,
    repeats: int = 16,
    gamma: float = 0.1,
    smoothing: float = 0.3,
    seed: int = 0,
) -> dict[str, Trajectory]:
    """Every method of `METHODS` from the same start on the same batches, with its bound.

    The step size is eta = mu n / (L N^alpha); mu = 1/4 and alpha = 2/3 are Reddi et al.'s. `gamma` and
    `smoothing` (the paper's alpha) are AGENT's. A step size at which SVRG has no bound is refused.
    """
    if epochs < 1 or repeats < 1:
        raise UserError(f"epochs is {epochs} and repeats {repeats}; both must be at least 1")
    problem = problem or Phases.random()
    setting = setting_of_theorem(mu, problem.smoothness, batch_size, len(problem.targets), gamma, alpha)
    if not setting.svrg().admissible:
        raise UserError(f"mu is {mu}, too large for a bound on SVRG (nu* = {setting.svrg().nu:.3g}); try 0.25")
    start = np.random.default_rng(seed).standard_normal((1, problem.features.shape[1]))
    result = {}
    for method in METHODS:
        walk = _Walk(problem, setting, method, smoothing, np.repeat(start, repeats, axis=0), seed)
        records = [walk.epoch(first=epoch == 0) for epoch in range(epochs)]
        result[method] = _trajectory(problem, setting, method, start, records)
    return result


class _Epoch(NamedTuple):
    """What one epoch leaves behind, by repeat."""

    squared_norm: Array
    loss: Array
    coefficient: Array


class _Walk:
    """One method on its way, all repeats at once."""

    def __init__(
        self, problem: Phases, setting: Setting, method: str, smoothing: float, theta: Array, seed: int
    ) -> None:
        self.problem, self.setting, self.method, self.smoothing = problem, setting, method, smoothing
        self.theta = self.snapshot = theta
        self.estimate = np.zeros((len(theta), 1))
        self.rng = np.random.default_rng(seed)

    def epoch(self, first: bool) -> _Epoch:
        """Take a snapshot, then Theorem 1's m steps."""
        if not first:
            fresh = loss_based_coefficient(self.problem, self.theta, self.snapshot, self.setting.batch_size)
            self.estimate = (1 - self.smoothing) * self.estimate + self.smoothing * fresh
        self.snapshot = self.theta
        steps = [self._step() for _ in range(self.setting.steps_per_epoch)]
        squared_norm, coefficient = (np.mean(column, axis=0) for column in zip(*steps, strict=True))
        return _Epoch(squared_norm, self.problem.losses(self.theta).mean(1), coefficient[:, 0])

    def _step(self) -> tuple[Array, Array]:
        """One step of the corrected gradient; |grad l|^2 before it, and its c."""
        problem, repeats = self.problem, len(self.theta)
        new, old = problem.slopes(self.theta), problem.slopes(self.snapshot)
        c = self._coefficient(new, old)
        batch = self.rng.integers(len(problem.targets), size=(repeats, self.setting.batch_size))
        change = np.take_along_axis(new - c * old, batch, axis=1)
        estimator = np.einsum("rb,rbd->rd", change, problem.features[batch]) / self.setting.batch_size
        estimator += c * problem.mean_gradient(old)
        self.theta = self.theta - self.setting.step_size * estimator
        return (problem.mean_gradient(new) ** 2).sum(1), c

    def _coefficient(self, new: Array, old: Array) -> Array:
        if self.method == "optimal c":
            return optimal_coefficient(self.problem, new, old)
        if self.method == "AGENT":
            return self.setting.coefficient * self.estimate
        return np.full_like(self.estimate, float(self.method == "SVRG"))


def loss_based_coefficient(problem: Phases, now: Array, before: Array, batch_size: int) -> Array:
    """Cov(l(B|now), l(B|before)) / Var(l(B|before)) over batches of the data in order, clamped to [0, 1]."""
    batches = len(problem.targets) // batch_size
    if batches < 2:
        raise UserError(f"the batch size is {batch_size}; the loss-based coefficient needs two batches at least")
    new, old = (
        problem.losses(theta)[:, : batches * batch_size].reshape(len(theta), batches, batch_size).mean(2)
        for theta in (now, before)
    )
    new, old = (loss - loss.mean(1, keepdims=True) for loss in (new, old))
    ratio = (new * old).sum(1, keepdims=True) / (old**2).sum(1, keepdims=True)
    return np.asarray(np.clip(ratio, 0, 1))


def optimal_coefficient(problem: Phases, new: Array, old: Array) -> Array:
    """The shared c* = tr Cov(g_new, g_old) / tr Var(g_old) over all samples, clamped to [0, 1]."""
    square = (problem.features**2).sum(1)
    mean_new, mean_old = problem.mean_gradient(new), problem.mean_gradient(old)
    covariance = (new * old * square).mean(1) - (mean_new * mean_old).sum(1)
    variance = (old**2 * square).mean(1) - (mean_old**2).sum(1)
    return np.asarray(np.clip(covariance / variance, 0, 1))[:, None]


def _trajectory(problem: Phases, setting: Setting, method: str, start: Array, records: list[_Epoch]) -> Trajectory:
    squared, losses, coefficients = (np.array(column) for column in zip(*records, strict=True))
    epochs = np.arange(1, len(records) + 1)
    steps = epochs * setting.steps_per_epoch
    per_epoch = setting.batch_size * setting.steps_per_epoch
    cost = per_epoch if method == "SGD" else 2 * per_epoch + setting.samples
    average = squared.cumsum(0) / epochs[:, None]
    gap = float(problem.losses(start).mean())  # no loss is below zero
    first, second = _bounds(setting, method, coefficients, gap, problem.sigma, steps)
    return Trajectory(
        steps=steps,
        sample_gradients=epochs * cost,
        loss=losses.mean(1),
        average=average.mean(1),
        spread=average.std(1),
        coefficient=coefficients.mean(1),
        first=first,
        second=second,
    )


def _bounds(
    setting: Setting, method: str, coefficients: Array, gap: float, sigma: float, steps: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Both terms of the method's bound after each number of steps.

    AGENT's c lies anywhere in [0, gamma]: phi is least at gamma, and the noise is that of the c's used, averaged
    over repeats and epochs. The c of least variance does at least as well at every step as any constant c, so
    every constant's bound holds for it, and the least is taken.
    """
    if method == "AGENT":
        worst = setting.bound(gap, sigma, 1)
        used = [[_noise(setting.at(c)) for c in row] for row in coefficients.tolist()]
        noise = np.mean(used, axis=1).cumsum() / np.arange(1, len(used) + 1)
        return worst.first / steps, worst.second * noise / _noise(setting)
    arms = {"SGD": [setting.sgd()], "SVRG": [setting.svrg()]}.get(
        method, [setting.sgd(), setting.svrg(), *(setting.at(float(c)) for c in np.linspace(0, 1, 51))]
    )
    bounds = [arm.bound(gap, sigma, 1) for arm in arms if arm.admissible]
    first = np.array([bound.first for bound in bounds])[:, None] / steps
    second = np.array([bound.second for bound in bounds])[:, None] + 0 * steps
    best = (first + second).argmin(0), np.arange(len(steps))
    return first[best], second[best]


def _noise(setting: Setting) -> float:
    """The part of the second term that depends on c other than through phi."""
    return setting.noise_weight * setting.kappa
