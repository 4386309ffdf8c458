"""Fast sparse training in a custom loop."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from equipoise.lr_schedule import Fast
from equipoise.topology.granet import GraNet
from equipoise.topology.topology import Topology


def fast(
    model: nn.Module, optimizer: Optimizer, *, sparsity: float, steps: int, **options: Any
) -> tuple[Topology, LambdaLR]:
    """Train a model to a sparsity in few steps, as the recipe overlay `fast` does.

    Args:
        model: The model.
        optimizer: Its optimizer, with the largest learning rate of the training.
        sparsity: Fraction of the weights that is zero at the end.
        steps: Number of optimizer steps of the whole training.
        **options: Other fields of `GraNet`, such as `exclude` and `seed`.

    Returns:
        The topology, which is attached: GraNet with ER densities, which starts with ten times the final number of
        active weights and updates every 2 % of the training. And the learning rate schedule, to be stepped after
        every step of the optimizer: a linear warm-up over 1/6 of the steps, then a cosine to zero.
    """
    topology = GraNet.fast(sparsity=sparsity, **options).attach(model, optimizer, total_steps=steps)
    schedule = Fast()
    return topology, LambdaLR(optimizer, lambda step: schedule.factor(step, epochs=1, steps_per_epoch=steps))
