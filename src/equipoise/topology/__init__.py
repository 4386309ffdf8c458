"""Which weights are active: masks, distributions over the layers, and algorithms that change the masks."""

from __future__ import annotations

from equipoise.catalogue import Catalogue
from equipoise.topology.algorithm import Algorithm, Dynamic
from equipoise.topology.bsr import BSRNet
from equipoise.topology.fast import fast
from equipoise.topology.gmp import GMP
from equipoise.topology.granet import GraNet
from equipoise.topology.hydra import Hydra
from equipoise.topology.mest import MEST
from equipoise.topology.pattern import PATTERNS
from equipoise.topology.rigl import RigL
from equipoise.topology.set import SET
from equipoise.topology.snfs import SNFS
from equipoise.topology.srigl import SRigL
from equipoise.topology.srste import SRSTE
from equipoise.topology.static import Dense, Static
from equipoise.topology.topology import Topology

ALGORITHMS: Catalogue[type[Algorithm]] = Catalogue(
    "topology",
    {
        "dense": Dense,
        "static": Static,
        "set": SET,
        "rigl": RigL,
        "srigl": SRigL,
        "snfs": SNFS,
        "mest": MEST,
        "gmp": GMP,
        "granet": GraNet,
        "sr-ste": SRSTE,
        "hydra": Hydra,
        "bsr-net": BSRNet,
    },
    group="topologies",
    base=Algorithm,
)

__all__ = [
    "ALGORITHMS",
    "GMP",
    "MEST",
    "PATTERNS",
    "SET",
    "SNFS",
    "SRSTE",
    "Algorithm",
    "BSRNet",
    "Dense",
    "Dynamic",
    "GraNet",
    "Hydra",
    "RigL",
    "SRigL",
    "Static",
    "Topology",
    "fast",
]
