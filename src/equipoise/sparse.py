"""Packed weights and the CPU kernels: training and inference that cost what the density says.

`pack` makes the sparse layers of a model hold only their active weights, `unpack` is the way back, `freeze`
prepares a packed model for inference, `describe` says how each layer runs, and `available` whether the kernels
could be found or compiled (`reason` says why not).
"""

from equipoise.deploy.frozen import freeze
from equipoise.kernels.library import available, reason
from equipoise.storage.pack import describe, unpack
from equipoise.topology.packing import pack

__all__ = ["available", "describe", "freeze", "pack", "reason", "unpack"]
