"""The initial mask of a topology."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.selection import select


class Planned(NamedTuple):
    """Plan for one sparse weight.

    Attributes:
        name: Name of the weight.
        weight: The weight.
        initial: Number of active weights at the start.
        final: Number of active weights at the end.
        active: Flat indices of the weights that are active at the start, in no order.
    """

    name: str
    weight: nn.Parameter
    initial: int
    final: int
    active: Tensor


def plan_layers(algorithm: Algorithm, model: nn.Module) -> list[Planned]:
    """Return the weights that the algorithm makes sparse. The plan is the same on every device and in every storage."""
    if algorithm.sparsity == 0 and isinstance(algorithm.distribution, str):
        return []
    chosen = select(model, algorithm.include, algorithm.exclude, algorithm.dense_first, algorithm.dense_last)
    shapes = {name: tuple(weight.shape) for name, weight in chosen.items()}
    initial, final = algorithm.initial_counts(shapes, model), algorithm.final_counts(shapes, model)
    if not any(final.values()):
        size = sum(weight.numel() for weight in chosen.values())
        raise UserError(f"none of the {size} chosen weights would be active; choose a lower sparsity or more weights")
    generator = torch.Generator()  # on the CPU: the same initial mask on every device
    planned = []
    for name, weight in chosen.items():
        generator.manual_seed(derive(algorithm.seed, "mask", name))
        order = torch.randperm(weight.numel(), generator=generator)
        if least := algorithm.fan_in(len(weight), final[name]):
            order = _each_unit_first(order, len(weight), least)
        planned.append(Planned(name, weight, initial[name], final[name], order[: initial[name]]))
    return planned


def _each_unit_first(order: Tensor, units: int, count: int) -> Tensor:
    """Move the first `count` indices of every unit to the front of a permutation."""
    by_unit = torch.argsort(order // (len(order) // units), stable=True).view(units, -1)
    first = torch.zeros(len(order), dtype=torch.bool).index_fill_(0, by_unit[:, :count].reshape(-1), True)
    return torch.cat([order[first], order[~first]])
