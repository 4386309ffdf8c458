"""Reset the state of LBFGS and Rprop when the topology changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.storage.sparse_weight import SparseWeight


def restart_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    """Clear the curvature of LBFGS, which belongs to the old topology, and its cached number of weights."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.state.clear()
        optimizer._numel_cache = None


def start_rprop(optimizer: torch.optim.Optimizer, layers: Sequence[SparseWeight]) -> None:
    """Give new weights Rprop's initial step size: it multiplies step sizes, and growth leaves them at zero."""
    if not isinstance(optimizer, torch.optim.Rprop):
        return
    sparse = {id(layer.parameter) for layer in layers}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            size = optimizer.state.get(parameter, {}).get("step_size") if id(parameter) in sparse else None
            if size is not None:
                size.masked_fill_(size == 0, float(group["lr"]))
