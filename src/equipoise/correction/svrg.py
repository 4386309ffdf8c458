"""SGD, SVRG and alpha-SVRG."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from equipoise.correction.coefficient import CoefficientChoice, Linear
from equipoise.correction.estimator import Estimator


@dataclass(frozen=True, kw_only=True)
class SGD(Estimator):
    """No correction: the plain batch gradient."""

    corrects: ClassVar[bool] = False

    @property
    def cost(self) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class SVRG(Estimator):
    """SVRG (Johnson & Zhang 2013): g = g_new - (g_old - g̃), so c = 1 and γ = 1."""


@dataclass(frozen=True, kw_only=True)
class AlphaSVRG(Estimator):
    """alpha-SVRG (Yin et al. 2023): SVRG with a weight that falls linearly from 0.75 to 0 over training."""

    coefficient: CoefficientChoice = field(default=Linear(0.75))
