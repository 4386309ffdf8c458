"""Corrections whose old gradient is the last step's: MVR, alone and with AGENT's weight."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.correction.estimator import CoefficientName, Estimator, Way
from equipoise.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MVR(Estimator):
    """MVR, also STORM (Cutkosky & Orabona 2019): d_t = g_new + (1-a)·(d_{t-1} - g_old), g_old at the last weights.

    value: 1 - a = 0.9. Costs two passes a step and no full pass.
    """

    value: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.when == "pays":
            raise UserError('when="pays" compares with a snapshot of an epoch ago, which MVR has not; use "always"')
        if self.coefficient == "gradient":
            raise UserError("MVR's estimate is no mean of old gradients; coefficient is fixed, linear or loss")

    @property
    def source(self) -> Way:
        return "previous"


@dataclass(frozen=True, kw_only=True)
class AgentMVR(MVR):
    """AGENT with MVR: MVR's recursion with 1-a replaced by γ·c, c from the losses at the last and current weights.

    The paper gives results for the combination (Table 5) but not its formula; this is the reading in which each
    method keeps its role: MVR supplies the old gradient, AGENT the weight. γ = 0.1, α = 0.3.
    """

    gamma: float = 0.1
    coefficient: CoefficientName = "loss"
