"""Which weights of a model a topology begins with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.selection import select


class Planned(NamedTuple):
    """A weight that will be sparse: its counts at the start and at the end, and the places that are active first."""

    name: str
    weight: nn.Parameter
    initial: int
    final: int
    active: Tensor  # flat places, in no order


def plan_layers(algorithm: Algorithm, model: nn.Module) -> list[Planned]:
    """What attaching the algorithm to the model will make sparse; the same on every device and in every storage."""
    if algorithm.sparsity == 0 and isinstance(algorithm.distribution, str):
        return []
    chosen = select(model, algorithm.include, algorithm.exclude, algorithm.dense_first, algorithm.dense_last)
    shapes = {name: tuple(weight.shape) for name, weight in chosen.items()}
    initial, final = algorithm.initial_counts(shapes, model), algorithm.final_counts(shapes, model)
    if not any(final.values()):
        size = sum(weight.numel() for weight in chosen.values())
        raise UserError(f"none of the {size} chosen weights would be active; take a lower sparsity or more weights")
    generator = torch.Generator()  # on the CPU: the same initial mask on every device
    planned = []
    for name, weight in chosen.items():
        generator.manual_seed(derive(algorithm.seed, "mask", name))
        active = torch.randperm(weight.numel(), generator=generator)[: initial[name]]
        planned.append(Planned(name, weight, initial[name], final[name], active))
    return planned
