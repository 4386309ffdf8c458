"""Packed models, whose training and inference on a CPU cost what their density says.

A packed layer stores its active weights only and runs on the sparse kernels:

    algorithm = eq.SET(sparsity=0.99)
    model = eq.sparse.pack(model, algorithm)  # before the optimizer is made
    topology = algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=steps)
    network = eq.sparse.freeze(model)  # after training

- `pack` returns a copy of a model in packed storage.
- `unpack` returns the state_dict with the usual keys, and the masks.
- `freeze` prepares a packed model for inference.
- `describe` returns how each packed layer runs, and `report` a table of all layers.
- `available` returns whether the kernels can be loaded or compiled, and `reason` why not.
"""

from equipoise.deploy.frozen import freeze
from equipoise.kernels.library import available, reason
from equipoise.storage.pack import describe, report, unpack
from equipoise.topology.packing import pack

__all__ = ["available", "describe", "freeze", "pack", "reason", "report", "unpack"]
