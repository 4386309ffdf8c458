"""Train neural networks that are sparse from the first step to the last, with adaptive gradient correction.

import equipoise as eq

topology = eq.RigL(sparsity=0.9).attach(model, optimizer, total_steps=steps)
agent = eq.Agent(gamma=0.1).attach(model, topology)
topology, schedule = eq.fast(model, optimizer, sparsity=0.99, steps=steps)
network = eq.load("exported.safetensors")
"""

from equipoise import models, sparse
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, AgentMVR, AlphaSVRG, Correction, FixedC
from equipoise.deploy import load, save
from equipoise.errors import UserError
from equipoise.topology import GMP, MEST, SET, SNFS, BSRNet, Dense, GraNet, RigL, Static, Topology, fast
from equipoise.topology.ema import EMA

__version__ = "0.1.0.dev0"

__all__ = [
    "EMA",
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
    "BSRNet",
    "Correction",
    "Dense",
    "FixedC",
    "GraNet",
    "RigL",
    "Static",
    "Topology",
    "UserError",
    "fast",
    "load",
    "models",
    "save",
    "sparse",
]
