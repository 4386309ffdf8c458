"""SGD, SVRG and AGENT on a small non-convex problem, compared with the bounds of `theory`.

All quantities in the bounds are known here: L, sigma and a lower bound of the loss. The rest follows the paper's
Appendix A: batches drawn with replacement, Theorem 1's step size and epoch length, a snapshot at the start of each
epoch. All repeats of a method advance together, one row each, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.analysis.theory import Setting, setting_of_theorem
from equipoise.errors import UserError

Array = NDArray[np.float64]

METHODS = ("SGD", "SVRG", "AGENT")
BATCH_SIZE = 10


@dataclass(frozen=True)
class Phases:
    """Non-convex losses l_i = 1 - cos(a_i . theta - y_i): find the theta with the phases y.

    l_i is |a_i|^2-smooth, the norm of its gradient is at most |a_i|, and its minimum is zero. Parameters are rows,
    one for each repeat; the gradient of sample i is its slope times a_i.

    Args:
        features: a_i, one row per sample.
        targets: y_i.
    """

    features: Array
    targets: Array

    @classmethod
    def random(cls, samples: int = 200, dimensions: int = 5, noise: float = 0.5, seed: int = 0) -> Phases:
        """Unit features in random directions, and the phases of a random theta with Gaussian noise as targets."""
        rng = np.random.default_rng(seed)
        features = rng.standard_normal((samples, dimensions))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        targets = features @ (2 * rng.standard_normal(dimensions)) + noise * rng.standard_normal(samples)
        return cls(features, targets)

    @property
    def sigma(self) -> float:
        """The largest norm of a sample gradient."""
        return float(np.linalg.norm(self.features, axis=1).max())

    @property
    def smoothness(self) -> float:
        """L of every sample loss."""
        return self.sigma**2

    def losses(self, theta: Array) -> Array:
        """Loss of every sample, by repeat."""
        return 1 - np.cos(theta @ self.features.T - self.targets)

    def slopes(self, theta: Array) -> Array:
        """Derivative of every sample loss along its a_i, by repeat."""
        return np.sin(theta @ self.features.T - self.targets)

    def mean_gradient(self, slopes: Array) -> Array:
        """Full gradient, by repeat."""
        return slopes @ self.features / len(self.targets)


@dataclass(frozen=True)
class Trajectory:
    """One method, with an entry for the end of every epoch.

    Attributes:
        steps: Number of steps so far.
        sample_gradients: Number of sample gradients computed so far.
        average: Mean of |grad l|^2 over all steps so far and over the repeats.
        bound: Theorem 1's bound on `average`.
    """

    steps: NDArray[np.int64]
    sample_gradients: NDArray[np.int64]
    average: Array
    bound: Array


def trajectories(
    problem: Phases | None = None,
    *,
    mu: float = 0.25,
    epochs: int = 30,
    repeats: int = 16,
    gamma: float = 0.1,
    smoothing: float = 0.3,
    seed: int = 0,
) -> dict[str, Trajectory]:
    """Run every method from the same start on the same batches.

    The step size is eta = mu n / (L N^alpha) with n = 10; mu = 1/4 and alpha = 2/3 are the values of Reddi et al.

    Args:
        problem: The problem; by default a random one.
        mu: Factor of the step size.
        epochs: Number of epochs.
        repeats: Number of runs to average over.
        gamma: AGENT's gamma.
        smoothing: AGENT's smoothing factor, alpha in the paper.
        seed: Seed of the start and of the batches.

    Returns:
        The trajectory of each method, by the names of `METHODS`.

    Raises:
        UserError: If SVRG has no bound at this step size.
    """
    if epochs < 1 or repeats < 1:
        raise UserError(f"epochs is {epochs} and repeats {repeats}; both must be at least 1")
    problem = problem or Phases.random()
    setting = setting_of_theorem(mu, problem.smoothness, BATCH_SIZE, len(problem.targets), gamma)
    if not setting.svrg().admissible:
        raise UserError(f"mu={mu} is too large for a bound on SVRG (nu* = {setting.svrg().nu:.3g}); use 0.25")
    start = np.random.default_rng(seed).standard_normal((1, problem.features.shape[1]))
    result = {}
    for method in METHODS:
        walk = _Walk(problem, setting, method, smoothing, np.repeat(start, repeats, axis=0), seed)
        records = [walk.epoch(first=epoch == 0) for epoch in range(epochs)]
        result[method] = _trajectory(problem, setting, method, start, records)
    return result


class _Epoch(NamedTuple):
    """Means over the steps of one epoch, by repeat."""

    squared_norm: Array
    coefficient: Array


class _Walk:
    """State of one method, for all repeats."""

    def __init__(
        self, problem: Phases, setting: Setting, method: str, smoothing: float, theta: Array, seed: int
    ) -> None:
        self.problem, self.setting, self.method, self.smoothing = problem, setting, method, smoothing
        self.theta = self.snapshot = theta
        self.estimate = np.zeros((len(theta), 1))
        self.rng = np.random.default_rng(seed)

    def epoch(self, first: bool) -> _Epoch:
        """Take a snapshot and then the m steps of Theorem 1."""
        if not first:
            fresh = loss_based_coefficient(self.problem, self.theta, self.snapshot, self.setting.batch_size)
            self.estimate = (1 - self.smoothing) * self.estimate + self.smoothing * fresh
        self.snapshot = self.theta
        steps = [self._step() for _ in range(self.setting.steps_per_epoch)]
        squared_norm, coefficient = (np.mean(column, axis=0) for column in zip(*steps, strict=True))
        return _Epoch(squared_norm, coefficient[:, 0])

    def _step(self) -> tuple[Array, Array]:
        """Take one step; return |grad l|^2 before the step, and c."""
        problem, repeats = self.problem, len(self.theta)
        new, old = problem.slopes(self.theta), problem.slopes(self.snapshot)
        c = self.setting.coefficient * self.estimate
        if self.method != "AGENT":
            c = np.full_like(c, float(self.method == "SVRG"))
        batch = self.rng.integers(len(problem.targets), size=(repeats, self.setting.batch_size))
        change = np.take_along_axis(new - c * old, batch, axis=1)
        estimator = np.einsum("rb,rbd->rd", change, problem.features[batch]) / self.setting.batch_size
        estimator += c * problem.mean_gradient(old)
        self.theta = self.theta - self.setting.step_size * estimator
        return (problem.mean_gradient(new) ** 2).sum(1), c


def loss_based_coefficient(problem: Phases, now: Array, before: Array, batch_size: int) -> Array:
    """Cov(l(B|now), l(B|before)) / Var(l(B|before)) over consecutive batches of the data, clamped to [0, 1]."""
    batches = len(problem.targets) // batch_size
    if batches < 2:
        raise UserError(
            f"batch_size={batch_size} leaves fewer than the two batches that the loss-based coefficient needs"
        )
    new, old = (
        problem.losses(theta)[:, : batches * batch_size].reshape(len(theta), batches, batch_size).mean(2)
        for theta in (now, before)
    )
    new, old = (loss - loss.mean(1, keepdims=True) for loss in (new, old))
    ratio = (new * old).sum(1, keepdims=True) / (old**2).sum(1, keepdims=True)
    return np.asarray(np.clip(ratio, 0, 1))


def _trajectory(problem: Phases, setting: Setting, method: str, start: Array, records: list[_Epoch]) -> Trajectory:
    squared, coefficients = (np.array(column) for column in zip(*records, strict=True))
    epochs = np.arange(1, len(records) + 1)
    steps = epochs * setting.steps_per_epoch
    per_epoch = setting.batch_size * setting.steps_per_epoch
    cost = per_epoch if method == "SGD" else 2 * per_epoch + setting.samples
    average = squared.cumsum(0) / epochs[:, None]
    gap = float(problem.losses(start).mean())  # the minimum of every loss is zero
    bound = _bound(setting, method, coefficients, gap, problem.sigma, steps)
    return Trajectory(steps=steps, sample_gradients=epochs * cost, average=average.mean(1), bound=bound)


def _bound(
    setting: Setting, method: str, coefficients: Array, gap: float, sigma: float, steps: NDArray[np.int64]
) -> Array:
    """The method's bound after each number of steps.

    AGENT's c varies in [0, gamma]. phi is smallest at gamma, and the noise is averaged over the c's used in the
    repeats and epochs so far.
    """
    if method != "AGENT":
        bound = (setting.sgd() if method == "SGD" else setting.svrg()).bound(gap, sigma, 1)
        return np.asarray(bound.first / steps + bound.second)
    worst = setting.bound(gap, sigma, 1)
    used = [[_noise(setting.at(c)) for c in row] for row in coefficients.tolist()]
    noise = np.mean(used, axis=1).cumsum() / np.arange(1, len(used) + 1)
    return np.asarray(worst.first / steps + worst.second * noise / _noise(setting))


def _noise(setting: Setting) -> float:
    """The factor of the second term that depends on c other than through phi."""
    return setting.noise_weight * setting.kappa
