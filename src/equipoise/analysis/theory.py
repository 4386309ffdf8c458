"""The paper's convergence bounds, computable: Theorem 1 for AGENT beside those of minibatch SVRG and SGD.

The derivation implemented here is Appendix A's with its slips put right (`DISCREPANCIES` names each). Every
sample loss l_i is L-smooth with gradient at most sigma, a batch of n is drawn with replacement, and
u = g_new - c (g_old - g~) is the estimator. It is unbiased, and for any rho > 0

    E|u - g|^2 <= ((1 + rho) c^2 L^2 |theta - theta~|^2 + (1 + 1/rho) (1 - c)^2 sigma^2) / n.

The paper takes rho = 1. At c = 1 there is nothing to split, and rho -> 0 gives the minibatch SVRG of Reddi et al.,
"Stochastic variance reduction for nonconvex optimization", ICML 2016; at c = 0, rho -> infinity gives SGD.
With A = (1 + rho) c^2, the function l + b_t |theta_t - theta~|^2 then falls by Phi_t |g|^2 a step, up to the noise:

    b_m = 0,   b_t = b_{t+1} (1 + eta zeta + 2 A eta^2 L^2 / n) + A eta^2 L^3 / n           (Lemma 3)
    Phi_t = eta - b_{t+1} eta / zeta - eta^2 L - 2 b_{t+1} eta^2,   phi = min Phi_t
    mean |g|^2 <= gap / (T phi) + (1 + 1/rho) (1 - c)^2 eta^2 sigma^2 xi / (m n phi)          (Lemma 4)

where T counts steps, gap = l(theta_0) - l(theta_*) and xi = sum_t (L + 2 b_{t+1}). Theorem 1 is Lemma 4 with
eta = mu n / (L N^alpha), zeta = L / N^(alpha/2), m = N^(3 alpha/2) / (mu n), nu = phi L N^alpha / n, kappa = xi / L.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError

Array = NDArray[np.float64]


class Discrepancy(NamedTuple):
    """A place of the paper, what is printed there, and what is right."""

    where: str
    printed: str
    right: str


DISCREPANCIES = tuple(
    Discrepancy(*row)
    for row in (
        ("Assumption 1", "the mean loss is L-smooth", "every sample's loss is; Lemma 1 uses it sample by sample"),
        ("Lemma 1", "l is strongly convex", "not used, and not true of a network"),
        ("Lemma 1", "(2/n) E|tau_t|^2, tau_t a batch mean", "of one sample; batches drawn with replacement"),
        ("Lemma 1 at c = 1", "4 L^2/n", "2 L^2/n, as for SVRG: there is nothing to split there"),
        ("Lemma 2", "+ eta |g|^2", "- eta |g|^2"),
        ("Lemma 3, proof", "|g| / (2 zeta)", "|g|^2 / (2 zeta)"),
        ("Lemma 4", "b_t with 4 c^2 eta L^2/n and 2 c^2 eta^2 L^2/n", "Lemma 3's eta^2 L^2 and eta^2 L^3"),
        ("Lemma 4, proof", "sums from t = 1; l(theta~^S) <= l(theta_*)", "from t = 0; >="),
        ("Lemma 4, last line", "gap / phi", "gap / (T phi)"),
        ("Theorem 1", "T training epochs", "T = S m steps"),
        ("Theorem 1, omega", "eta zeta + 4 c^2 eta^2 L/n", "eta zeta + 4 c^2 eta^2 L^2/n"),
        ("Theorem 1, b_0", "1/omega <= N^(3 alpha/2) / ((4c+1) mu n)", "1/omega <= N^(3 alpha/2) / (mu n)"),
        ("Theorem 1, b_0", "a factor n", "none: b_0 <= 2 c^2 mu L (e^(4c^2+1) - 1) / N^(alpha/2)"),
        ("Theorem 1, (1+omega)^m", "<= e^(1/(4c^2+1))", "<= e^(4c^2+1)"),
        ("Theorem 1, nu", ">= mu (1 - b_0 eta/zeta - L eta - b_0 eta)", "<= mu (1 - b_0/zeta - L eta - 2 b_0 eta)"),
        ("Theorem 1, xi", "min over epochs", "max over epochs"),
        ("Theorem 1, xi", "2 sum b_t with weight 2 c^2", "2 sum b_{t+1} with weight 4 c^2"),
        ("Theorem 1, xi", "omega <= mu n / N^(3 alpha/2)", ">=, which is the direction the step needs"),
        ("Theorem 1, second term", "without (1 - c)^2", "with it; only then does c = 1 give SVRG's bound"),
        ("Remark 3", "N makes it small", "N cancels at a given eta: 2 (1-c)^2 sigma^2 (L eta/n) (mu/nu) (kappa/m)"),
        ("Remark 4", "smaller nu", "larger nu, as Appendix A says; SGD's, at c = 0, is larger still"),
        ("Appendix A.6, SVHN", "batch size m = 573", "573 = ceil(73257 / 128) is the number of batches; n = 128"),
    )
)
"""Every place where the appendix as printed departs from the derivation that holds."""


@dataclass(frozen=True)
class Setting:
    """What the bounds depend on; in the paper's symbols L, eta, n, N, c, alpha, m, and rho of the module's formula.

    `epoch_length` m defaults to Theorem 1's floor(N^(3 alpha/2) / (mu n)), at least 1. The coefficient is the
    one that multiplies the old gradient, so for AGENT it is gamma times the estimate.
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
        """The same with another c: Young's split at the paper's rho = 1."""
        return replace(self, coefficient=coefficient, split=1.0)

    def svrg(self) -> Setting:
        """Minibatch SVRG as Reddi et al. analyse it: c = 1 and no split, so that `nu` is the paper's nu*."""
        return replace(self, coefficient=1.0, split=0.0)

    def sgd(self) -> Setting:
        """Plain SGD: c = 0 and no split."""
        return replace(self, coefficient=0.0, split=math.inf)

    @property
    def mu(self) -> float:
        """mu = eta L N^alpha / n; Theorem 1 asks for mu < 1."""
        return self.step_size * self.smoothness * self.samples**self.alpha / self.batch_size

    @property
    def zeta(self) -> float:
        """zeta = L / N^(alpha/2), the weight in Young's inequality for the distance to the snapshot."""
        return self.smoothness / self.samples ** (self.alpha / 2)

    @property
    def steps_per_epoch(self) -> int:
        """m: as given, else Theorem 1's."""
        if self.epoch_length is not None:
            return self.epoch_length
        return max(1, math.floor(self.samples ** (1.5 * self.alpha) / (self.mu * self.batch_size)))

    @property
    def drift_weight(self) -> float:
        """(1 + rho) c^2, which multiplies L^2 |theta - theta~|^2 / n in the variance; the paper's 2 c^2."""
        return (1 + self.split) * self.coefficient**2 if self.coefficient > 0 else 0.0

    @property
    def noise_weight(self) -> float:
        """(1 + 1/rho) (1 - c)^2, which multiplies sigma^2 / n in the variance; the paper's 2 (1 - c)^2."""
        return (1 + 1 / self.split) * (1 - self.coefficient) ** 2 if self.coefficient < 1 else 0.0

    @property
    def omega(self) -> float:
        """Growth of b_t per step, less one: eta zeta + 2 A eta^2 L^2 / n."""
        return self.step_size * (
            self.zeta + 2 * self.drift_weight * self.step_size * self.smoothness**2 / self.batch_size
        )

    @property
    def _source(self) -> float:
        """What every step adds to b_t: A eta^2 L^3 / n."""
        return self.drift_weight * self.step_size**2 * self.smoothness**3 / self.batch_size

    def b_by_recursion(self) -> Array:
        """b_0 .. b_m from b_m = 0 backwards, as Lemma 3 states them."""
        b = np.zeros(self.steps_per_epoch + 1)
        for t in reversed(range(self.steps_per_epoch)):
            b[t] = b[t + 1] * (1 + self.omega) + self._source
        return b

    def b(self) -> Array:
        """b_0 .. b_m in closed form: A eta^2 L^3 / n * ((1 + omega)^(m - t) - 1) / omega."""
        return self._b_before_end(np.arange(self.steps_per_epoch, -1, -1.0))

    def _b_before_end(self, steps: Array) -> Array:
        """b_t for t = m - steps."""
        if self._source == 0:
            return 0 * steps
        with np.errstate(over="ignore"):  # an epoch without end: b is infinite and the setting not admissible
            return np.asarray(self._source * np.expm1(steps * np.log1p(self.omega)) / self.omega)

    def _phi_given(self, b_after: Array) -> Array:
        eta, smoothness = self.step_size, self.smoothness
        with np.errstate(over="ignore"):
            return np.asarray(eta * (1 - b_after / self.zeta - eta * smoothness - 2 * eta * b_after))

    def phi_by_step(self) -> Array:
        """Phi_0 .. Phi_{m-1}: how much of |g|^2 each step is sure to take off the loss."""
        return self._phi_given(self.b()[1:])

    @property
    def phi(self) -> float:
        """phi = min_t Phi_t, reached at t = 0 because b_t falls with t."""
        return float(self._phi_given(self._b_before_end(np.array(self.steps_per_epoch - 1.0))))

    @property
    def nu(self) -> float:
        """The largest nu with phi >= n nu / (L N^alpha); always below mu."""
        return self.phi * self.mu / self.step_size

    @property
    def xi(self) -> float:
        """xi = sum_t (L + 2 b_{t+1}), the geometric series summed."""
        m = self.steps_per_epoch
        b_sum = (float(self._b_before_end(np.array(float(m)))) - m * self._source) / self.omega
        return m * self.smoothness + 2 * b_sum

    @property
    def kappa(self) -> float:
        """The smallest kappa with xi <= kappa L; about m for a small c."""
        return self.xi / self.smoothness

    @property
    def admissible(self) -> bool:
        """Whether Theorem 1 says anything here: 0 < mu < 1 and nu > 0."""
        return self.mu < 1 and self.nu > 0

    def bound(self, gap: float, sigma: float, steps: int) -> Bound:
        """Theorem 1's two terms after `steps` = S m steps; SVRG's bound is that of `svrg()`, whose second is 0."""
        if not self.phi > 0:
            raise UserError(f"phi is {self.phi:.3g}, so there is no bound; a smaller step size makes it positive")
        spread = self.samples**self.alpha
        first = gap * self.smoothness * spread / (steps * self.batch_size * self.nu)
        second = self.noise_weight * self.kappa * (self.mu * sigma) ** 2
        return Bound(first, second / (spread * self.steps_per_epoch * self.nu))


class Bound(NamedTuple):
    """The two terms of Theorem 1: what is left of the start, and the floor set by the noise."""

    first: float
    second: float

    @property
    def total(self) -> float:
        return self.first + self.second


def setting_of_theorem(
    mu: float, smoothness: float, batch_size: int, samples: int, coefficient: float, alpha: float = 2 / 3
) -> Setting:
    """The setting whose step size is Theorem 1's: eta = mu n / (L N^alpha)."""
    step_size = mu * batch_size / (smoothness * samples**alpha)
    return Setting(smoothness, step_size, batch_size, samples, coefficient, alpha)


def steps_until_svrg_is_tighter(setting: Setting, gap: float, sigma: float) -> float:
    """Steps after which SVRG's bound is below AGENT's: its one term goes to zero and AGENT's second does not."""
    agent, svrg = (arm.bound(gap, sigma, 1) for arm in (setting, setting.svrg()))
    return max(0.0, svrg.first - agent.first) / agent.second if agent.second > 0 else math.inf


@dataclass(frozen=True)
class RealCase:
    """A line of Appendix A's "Real case analysis", as printed; eta = gamma = 0.1, L, alpha and sigma not given."""

    name: str
    batch_size: int
    samples: int
    nu: float
    nu_star: float
    second_term: float
    step_size: float = 0.1
    coefficient: float = 0.1


CIFAR = RealCase("CIFAR-10/100", 128, 50_000, nu=0.1, nu_star=0.06, second_term=1e-5)
SVHN = RealCase("SVHN", 573, 73_257, nu=0.4, nu_star=0.06, second_term=1e-4)


class Match(NamedTuple):
    """An AGENT setting with the printed nu, its nu*, and the sigma that makes the printed second term."""

    setting: Setting
    nu_star: float
    sigma: float


def closest_match(case: RealCase, svrg_split: float = 0.0, epoch_length: int | None = None) -> Match | None:
    """Among all admissible L and alpha that give the printed nu exactly, the one whose nu* is nearest the printed.

    `svrg_split` 0 takes nu* from Reddi et al., 1 from the paper's own formulas at c = 1. `epoch_length` replaces
    Theorem 1's m. None where no L and alpha give the printed nu.
    """
    best: Match | None = None
    for grid in (np.linspace(0.005, 1, 399), np.linspace(-0.0025, 0.0025, 101)):
        alphas = grid if best is None else np.clip(best.setting.alpha + grid, 0.001, 1)  # coarse, then fine
        found = [match for alpha in alphas.tolist() if (match := _match(case, alpha, svrg_split, epoch_length))]
        best = min(found, key=lambda match: abs(match.nu_star - case.nu_star), default=best)
        if best is None:
            break
    return best


def _match(case: RealCase, alpha: float, svrg_split: float, epoch_length: int | None) -> Match | None:
    """The match at one alpha. L follows from nu: mu = nu / (phi / eta) is iterated from below to its least root."""
    mu = case.nu
    for _ in range(200):
        smoothness = mu * case.batch_size / (case.step_size * case.samples**alpha)
        setting = Setting(
            smoothness, case.step_size, case.batch_size, case.samples, case.coefficient, alpha, epoch_length
        )
        if not setting.admissible:
            return None
        if abs(setting.nu - case.nu) < 1e-6:
            svrg = replace(setting, coefficient=1.0, split=svrg_split)
            sigma = math.sqrt(case.second_term / setting.bound(0, 1, 1).second)
            return Match(setting, svrg.nu, sigma)
        mu = case.nu * mu / setting.nu
    return None
