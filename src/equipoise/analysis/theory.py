"""The paper's convergence bounds as numbers: Theorem 1 for AGENT, and the bounds of minibatch SVRG and SGD.

This is the derivation of the paper's Appendix A with its errors corrected; docs/theory.md lists them. Every sample
loss l_i is L-smooth with gradient at most sigma, a batch of n is drawn with replacement, and the estimator is
u = g_new - c (g_old - g~). It is unbiased, and for any rho > 0

    E|u - g|^2 <= ((1 + rho) c^2 L^2 |theta - theta~|^2 + (1 + 1/rho) (1 - c)^2 sigma^2) / n.

The paper uses rho = 1. At c = 1 no split is needed, and rho -> 0 gives the minibatch SVRG of Reddi et al.,
"Stochastic variance reduction for nonconvex optimization", ICML 2016; at c = 0, rho -> infinity gives SGD.
With A = (1 + rho) c^2, each step decreases l + b_t |theta_t - theta~|^2 by Phi_t |g|^2 up to the noise:

    b_m = 0,   b_t = b_{t+1} (1 + eta zeta + 2 A eta^2 L^2 / n) + A eta^2 L^3 / n           (Lemma 3)
    Phi_t = eta - b_{t+1} eta / zeta - eta^2 L - 2 b_{t+1} eta^2,   phi = min Phi_t
    mean |g|^2 <= gap / (T phi) + (1 + 1/rho) (1 - c)^2 eta^2 sigma^2 xi / (m n phi)          (Lemma 4)

T is the number of steps, gap = l(theta_0) - l(theta_*) and xi = sum_t (L + 2 b_{t+1}). Theorem 1 is Lemma 4 with
eta = mu n / (L N^alpha), zeta = L / N^(alpha/2), m = N^(3 alpha/2) / (mu n), nu = phi L N^alpha / n, kappa = xi / L.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from equipoise.errors import UserError


@dataclass(frozen=True)
class Setting:
    """The quantities that the bounds depend on.

    Args:
        smoothness: L.
        step_size: eta.
        batch_size: n.
        samples: N.
        coefficient: The factor c of the old gradient; for AGENT, gamma times the estimate.
        alpha: Exponent of Theorem 1's step size.
        epoch_length: m; by default Theorem 1's floor(N^(3 alpha/2) / (mu n)), at least 1.
        split: rho in the formula of this module.
    """

    smoothness: float
    step_size: float
    batch_size: int
    samples: int
    coefficient: float
    alpha: float = 2 / 3
    epoch_length: int | None = None
    split: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.smoothness < math.inf and 0 < self.step_size < math.inf):
            raise UserError(f"L is {self.smoothness} and eta {self.step_size}; both must be above 0 and finite")
        if not 1 <= self.batch_size <= self.samples:
            raise UserError(f"the batch size is {self.batch_size}; it must lie between 1 and N = {self.samples}")
        if not 0 <= self.coefficient <= 1:
            raise UserError(f"the coefficient c is {self.coefficient}; it must lie in [0, 1]")
        if not 0 < self.alpha <= 1:
            raise UserError(f"alpha is {self.alpha}; it must lie in (0, 1]")
        if self.epoch_length is not None and self.epoch_length < 1:
            raise UserError(f"the epoch length is {self.epoch_length}; it must be at least 1")
        if self.split < 0 or (self.split == 0 and self.coefficient < 1):
            raise UserError(f"the split rho is {self.split}; it must be above 0, or 0 at c = 1")
        if math.isinf(self.split) and self.coefficient > 0:
            raise UserError("an infinite split rho leaves no finite bound; it is for c = 0")

    def at(self, coefficient: float) -> Setting:
        """The same setting with another c and the paper's rho = 1."""
        return replace(self, coefficient=coefficient, split=1.0)

    def svrg(self) -> Setting:
        """Minibatch SVRG as analysed by Reddi et al.: c = 1 without a split, so that `nu` is the paper's nu*."""
        return replace(self, coefficient=1.0, split=0.0)

    def sgd(self) -> Setting:
        """Plain SGD: c = 0 without a split."""
        return replace(self, coefficient=0.0, split=math.inf)

    @property
    def mu(self) -> float:
        """mu = eta L N^alpha / n; Theorem 1 requires mu < 1."""
        return self.step_size * self.smoothness * self.samples**self.alpha / self.batch_size

    @property
    def zeta(self) -> float:
        """zeta = L / N^(alpha/2), the weight in Young's inequality for the distance to the snapshot."""
        return self.smoothness / self.samples ** (self.alpha / 2)

    @property
    def steps_per_epoch(self) -> int:
        """m, by default the value of Theorem 1."""
        if self.epoch_length is not None:
            return self.epoch_length
        return max(1, math.floor(self.samples ** (1.5 * self.alpha) / (self.mu * self.batch_size)))

    @property
    def drift_weight(self) -> float:
        """(1 + rho) c^2, the factor of L^2 |theta - theta~|^2 / n in the variance; 2 c^2 in the paper."""
        return (1 + self.split) * self.coefficient**2 if self.coefficient > 0 else 0.0

    @property
    def noise_weight(self) -> float:
        """(1 + 1/rho) (1 - c)^2, the factor of sigma^2 / n in the variance; 2 (1 - c)^2 in the paper."""
        return (1 + 1 / self.split) * (1 - self.coefficient) ** 2 if self.coefficient < 1 else 0.0

    @property
    def omega(self) -> float:
        """Relative growth of b_t per step: eta zeta + 2 A eta^2 L^2 / n."""
        return self.step_size * (
            self.zeta + 2 * self.drift_weight * self.step_size * self.smoothness**2 / self.batch_size
        )

    @property
    def _source(self) -> float:
        """Constant term of the recursion for b_t: A eta^2 L^3 / n."""
        return self.drift_weight * self.step_size**2 * self.smoothness**3 / self.batch_size

    def _b(self, steps_left: float) -> np.float64:
        """b_t for t = m - steps_left: A eta^2 L^3 / n * ((1 + omega)^steps_left - 1) / omega."""
        if self._source == 0:
            return np.float64(0)
        with np.errstate(over="ignore"):  # for a very long epoch b is infinite and the setting not admissible
            return np.float64(self._source * np.expm1(steps_left * np.log1p(self.omega)) / self.omega)

    @property
    def phi(self) -> float:
        """phi = min_t Phi_t, which is Phi_0 because b_t decreases with t."""
        eta, b = self.step_size, self._b(self.steps_per_epoch - 1.0)
        with np.errstate(over="ignore"):
            return float(eta * (1 - b / self.zeta - eta * self.smoothness - 2 * eta * b))

    @property
    def nu(self) -> float:
        """The largest nu with phi >= n nu / (L N^alpha); it is below mu."""
        return self.phi * self.mu / self.step_size

    @property
    def xi(self) -> float:
        """xi = sum_t (L + 2 b_{t+1}), by the sum of the geometric series."""
        m = self.steps_per_epoch
        b_sum = (float(self._b(float(m))) - m * self._source) / self.omega
        return m * self.smoothness + 2 * b_sum

    @property
    def kappa(self) -> float:
        """The smallest kappa with xi <= kappa L; about m for small c."""
        return self.xi / self.smoothness

    @property
    def admissible(self) -> bool:
        """Whether Theorem 1 applies: mu < 1 and nu > 0."""
        return self.mu < 1 and self.nu > 0

    def bound(self, gap: float, sigma: float, steps: int) -> Bound:
        """The two terms of Theorem 1 after `steps` steps; for `svrg()` the second term is 0.

        Args:
            gap: Loss at the start minus the minimum.
            sigma: Largest norm of a sample gradient.
            steps: Number of steps, T.
        """
        if not self.phi > 0:
            raise UserError(f"phi is {self.phi:.3g}, so there is no bound; use a smaller step size")
        spread = self.samples**self.alpha
        first = gap * self.smoothness * spread / (steps * self.batch_size * self.nu)
        second = self.noise_weight * self.kappa * (self.mu * sigma) ** 2
        return Bound(first, second / (spread * self.steps_per_epoch * self.nu))


class Bound(NamedTuple):
    """The two terms of Theorem 1: the decaying influence of the start, and the constant level of the noise."""

    first: float
    second: float

    @property
    def total(self) -> float:
        return self.first + self.second


def setting_of_theorem(
    mu: float, smoothness: float, batch_size: int, samples: int, coefficient: float, alpha: float = 2 / 3
) -> Setting:
    """The setting with the step size of Theorem 1, eta = mu n / (L N^alpha)."""
    step_size = mu * batch_size / (smoothness * samples**alpha)
    return Setting(smoothness, step_size, batch_size, samples, coefficient, alpha)
