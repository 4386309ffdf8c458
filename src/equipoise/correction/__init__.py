"""Which gradient is used: adaptive gradient correction and its relatives."""

from __future__ import annotations

from equipoise.catalogue import Catalogue
from equipoise.correction.agent import Agent, AgentNoGamma, AgentReducedRate, FixedC
from equipoise.correction.correction import Correction
from equipoise.correction.cost import Plan
from equipoise.correction.estimator import Estimator
from equipoise.correction.finite import NonFiniteLoss
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
)

__all__ = [
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
    "Correction",
    "Estimator",
    "FixedC",
    "NonFiniteLoss",
    "Plan",
]
