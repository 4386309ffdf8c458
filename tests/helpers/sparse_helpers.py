"""Small models for the tests of packing, and masks for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.topology.packing import pack


def masks(model: nn.Module, density: float = 0.3) -> dict[str, Tensor]:
    """Random masks for all packable layers, applied; the same ones for every model of one shape."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            found[f"{name}.weight"] = torch.rand(layer.weight.shape, generator=generator) < density
            layer.weight.data *= found[f"{name}.weight"]
    return found


def packed_model(model: nn.Module) -> nn.Module:
    return pack(model, masks(model))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(24, 4),
    ).eval()  # fmt: skip


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)).eval()


def sequences() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3)).eval()
