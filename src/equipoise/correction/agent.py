"""Adaptive gradient correction (AGENT) and its ablations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from equipoise.correction.coefficient import CoefficientChoice, Fixed, Loss
from equipoise.correction.estimator import Estimator


@dataclass(frozen=True, kw_only=True)
class Agent(Estimator):
    """AGENT (Lei et al. 2024, Algorithm 1): g = g_new - γ·c·(g_old - g̃), c smoothed from the covariance of losses.

    The defaults are those of the paper: γ = 0.1, α = 0.3, c₀ = 0, a full pass and a new snapshot every epoch.
    """

    gamma: float = 0.1
    coefficient: CoefficientChoice = field(default=Loss())


@dataclass(frozen=True, kw_only=True)
class AgentNoGamma(Agent):
    """AGENT without the scaling γ (the paper's ablation "No γ")."""

    gamma: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AgentReducedRate(AgentNoGamma):
    """AGENT without γ at a tenth of the learning rate (the paper's appendix)."""

    learning_rate_factor: ClassVar[float] = 0.1


@dataclass(frozen=True, kw_only=True)
class FixedC(Estimator):
    """A constant weight c = 0.1 (the paper's ablation "Fixed c")."""

    coefficient: CoefficientChoice = field(default=Fixed(0.1))
