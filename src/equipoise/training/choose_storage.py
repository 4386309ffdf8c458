"""Masked or packed: the storage of a run."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.topology.initial import plan_layers
from equipoise.topology.packing import why_not
from equipoise.training.recipe import Recipe

PACKED_FROM = 0.9  # sparsity


def choose_storage(recipe: Recipe, model: nn.Module, device: torch.device) -> str:
    """The storage of the recipe; if it says `auto`, packed on a CPU from 90 % sparsity, where it is faster."""
    algorithm = recipe.topology
    if recipe.storage == "masked" or algorithm.sparsity == 0:
        return "masked"
    if obstacle := _obstacle(recipe, model, device):
        if recipe.storage == "packed":
            raise UserError(f"storage=packed: {obstacle}; use storage=masked")
        return "masked"
    if recipe.storage == "packed":
        return "packed"
    layers = plan_layers(algorithm, model)
    density = sum(layer.initial for layer in layers) / sum(layer.weight.numel() for layer in layers)
    if density > 1 - PACKED_FROM + 1e-3:  # counts are rounded
        return "masked"
    if not library.available():
        warnings.warn(f"weights are stored masked, which is slower: {library.reason()}", stacklevel=2)
        return "masked"
    return "packed"


def _obstacle(recipe: Recipe, model: nn.Module, device: torch.device) -> str | None:
    """Why the weights cannot be packed; `None` if they can."""
    if device.type != "cpu":
        return f"the kernels are for a CPU, and the device is {device}"
    if obstacle := recipe.topology.packing_obstacle():
        return obstacle
    return why_not(model, recipe.topology)
