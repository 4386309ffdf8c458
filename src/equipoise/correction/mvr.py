"""MVR, alone and with the weight of AGENT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from equipoise.correction.coefficient import CoefficientChoice, Fixed, Gradient, Loss
from equipoise.correction.estimator import Estimator, ModeName
from equipoise.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MVR(Estimator):
    """MVR, also STORM (Cutkosky & Orabona 2019): d_t = g_new + (1-a)·(d_{t-1} - g_old), g_old at the last weights.

    c = 1 - a = 0.9. The cost is two passes per step; there is no full pass.
    """

    coefficient: CoefficientChoice = field(default=Fixed(0.9))
    mode: ModeName = "previous"
    modes: ClassVar[tuple[ModeName, ...]] = ("previous",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.when == "pays":
            raise UserError('when="pays" compares with the snapshot of the last refresh; MVR has none, use "always"')
        if isinstance(self.coefficient, Gradient):
            raise UserError("coefficient=gradient needs a mean of old gradients; MVR takes fixed, linear or loss")


@dataclass(frozen=True, kw_only=True)
class AgentMVR(MVR):
    """AGENT with MVR: MVR's recursion with 1-a replaced by γ·c, c from the losses at the last and current weights.

    The paper gives results for the combination (Table 5) but no formula. In this reading MVR supplies the old
    gradient and AGENT supplies the weight. γ = 0.1, α = 0.3.
    """

    gamma: float = 0.1
    coefficient: CoefficientChoice = field(default=Loss())
