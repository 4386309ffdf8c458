"""Initial weights and initial densities that BSR-Net prescribes.

Özdenizci and Legenstein, "Training adversarially robust sparse networks via Bayesian connectivity
sampling", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from equipoise.errors import UserError


def weighted_layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """Convolutions and linear layers by name, in order; their weights are made sparse."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}


def he_initialise(model: nn.Module) -> None:
    """Draw weights from N(0, 2/fan_in) and set biases to zero (He et al. 2015).

    BSR-Net's TensorFlow initialiser has the same variance but truncates the normal at two standard deviations.
    """
    for layer in weighted_layers(model).values():
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def half(density: float) -> float:
    """Initial density p/2 of the large layers for a target density p."""
    if not 0 < density <= 1:
        raise UserError(f"density={density} must be above 0 and at most 1")
    return density / 2


def by_stage(model: nn.Module, densities: Mapping[str, float]) -> dict[str, float]:
    """Density of every convolution and linear weight, given the density of each child of the model."""
    return {f"{name}.weight": densities[name.partition(".")[0]] for name in weighted_layers(model)}
