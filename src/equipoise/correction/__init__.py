"""Which gradient is used: adaptive gradient correction and related methods."""

from __future__ import annotations

from equipoise.catalogue import Catalogue
from equipoise.correction.agent import Agent, AgentNoGamma, AgentReducedRate, FixedC
from equipoise.correction.coefficient import COEFFICIENTS, AsPublished, Fixed, Gradient, Linear, Loss
from equipoise.correction.correction import Correction
from equipoise.correction.cost import CostEstimate
from equipoise.correction.estimator import Estimator
from equipoise.correction.gradients import Gradients
from equipoise.correction.mvr import MVR, AgentMVR
from equipoise.correction.saga import SAGA
from equipoise.correction.svrg import SGD, SVRG, AlphaSVRG

CORRECTIONS: Catalogue[type[Estimator]] = Catalogue(
    "correction",
    {
        "sgd": SGD,
        "agent": Agent,
        "agent-no-gamma": AgentNoGamma,
        "agent-reduced-lr": AgentReducedRate,
        "fixed": FixedC,
        "svrg": SVRG,
        "alpha-svrg": AlphaSVRG,
        "mvr": MVR,
        "agent-mvr": AgentMVR,
        "saga": SAGA,
    },
    group="corrections",
    base=Estimator,
)

__all__ = [
    "COEFFICIENTS",
    "CORRECTIONS",
    "MVR",
    "SAGA",
    "SGD",
    "SVRG",
    "Agent",
    "AgentMVR",
    "AgentNoGamma",
    "AgentReducedRate",
    "AlphaSVRG",
    "AsPublished",
    "Correction",
    "CostEstimate",
    "Estimator",
    "Fixed",
    "FixedC",
    "Gradient",
    "Gradients",
    "Linear",
    "Loss",
]
