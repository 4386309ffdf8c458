"""Train neural networks that are sparse from the first step to the last, with adaptive gradient correction.

import equipoise as eq

topology = eq.RigL(sparsity=0.9).attach(model, optimizer, total_steps=steps)
agent = eq.Agent(gamma=0.1).attach(model, topology)
network = eq.load("exported.safetensors")
"""

from os import PathLike

from torch.nn import Module

from equipoise import models
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, AgentMVR, AlphaSVRG, Correction, FixedC
from equipoise.errors import UserError
from equipoise.topology import GMP, MEST, SET, SNFS, BSRNet, Dense, GraNet, RigL, Static, Topology
from equipoise.topology.ema import EMA

__version__ = "0.1.0.dev0"


def load(path: str | PathLike[str], dense: bool = False, into: Module | None = None) -> Module:
    """Load a network from a file that `equipoise export` or `save` wrote, see `equipoise.deploy.load`."""
    from equipoise.deploy import load as load_file  # here, so that `import equipoise` stays fast

    return load_file(path, dense, into)


def save(model: Module, path: str | PathLike[str], values: str = "float32", force: bool = False) -> None:
    """Save any model to a small file for `load(path, into=model)`, see `equipoise.deploy.save`."""
    from equipoise.deploy import save as save_file

    save_file(model, path, values, force)


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
    "load",
    "models",
    "save",
]
