"""Adapt the state of some optimizers when the topology changes, and skip optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.shards import local
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.world import World


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
                local(size).masked_fill_(local(size) == 0, float(group["lr"]))


def loss_scale(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The factor of the gradients that a GradScaler has told a fused optimizer for the time of its step."""
    return getattr(optimizer, "grad_scale", None)


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has told a fused optimizer, for the time of its step, to change nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def is_dry(optimizer: torch.optim.Optimizer, world: World) -> bool:
    """Whether a step has learning rate 0 and zero gradients: torch.distributed.checkpoint takes one to create state."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    known = [not isinstance(rate, Tensor) or rate.device.type == "cpu" for rate in rates]
    if optimizer.state or not all(known) or any(float(rate) for rate in rates):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return world.all(not any(bool(local(g).any()) for g in gradients if g is not None))


class SkippedStep:
    """Sets gradients aside: every optimizer leaves a parameter without gradient alone, its momentum and decay too."""

    def __init__(self) -> None:
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the next step of the optimizer change nothing."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the gradients back, unscaled as a step would leave them."""
        scale = loss_scale(optimizer)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient if scale is None else gradient.div_(scale.to(gradient))
        self._gradients = []
