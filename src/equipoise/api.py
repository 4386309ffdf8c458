"""The public names of the package, which `import equipoise` makes available."""

from equipoise import models, sparse
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, AgentMVR, AlphaSVRG, Correction, FixedC
from equipoise.deploy import load, save
from equipoise.errors import UserError
from equipoise.topology import (
    GMP,
    MEST,
    SET,
    SNFS,
    SRSTE,
    BSRNet,
    Dense,
    GraNet,
    Hydra,
    RigL,
    SRigL,
    Static,
    Topology,
    fast,
)
from equipoise.topology.ema import EMA

__all__ = [
    "EMA",
    "GMP",
    "MEST",
    "MVR",
    "SAGA",
    "SET",
    "SGD",
    "SNFS",
    "SRSTE",
    "SVRG",
    "Agent",
    "AgentMVR",
    "AlphaSVRG",
    "BSRNet",
    "Correction",
    "Dense",
    "FixedC",
    "GraNet",
    "Hydra",
    "RigL",
    "SRigL",
    "Static",
    "Topology",
    "UserError",
    "fast",
    "load",
    "models",
    "save",
    "sparse",
]
