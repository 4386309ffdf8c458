"""equipoise: neural networks that are sparse from the first step to the last, with adaptive gradient correction.

import equipoise as eq

topology = eq.RigL(sparsity=0.9).attach(model, optimizer, total_steps=steps)
agent = eq.Agent(gamma=0.1, smoothing=0.3).attach(model, topology)
"""

from equipoise import models
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, AgentMVR, AlphaSVRG, Correction, FixedC
from equipoise.errors import UserError
from equipoise.topology import GMP, MEST, SET, SNFS, Dense, GraNet, RigL, Static, Topology

__version__ = "0.1.0.dev0"

__all__ = [
    "GMP",
    "MEST",
    "MVR",
    "SAGA",
    "SET",
    "SGD",
    "SNFS",
    "SVRG",
    "Agent",
    "AgentMVR",
    "AlphaSVRG",
    "Correction",
    "Dense",
    "FixedC",
    "GraNet",
    "RigL",
    "Static",
    "Topology",
    "UserError",
    "models",
]
