"""What BSR-Net asks of a model: He initialisation and an initial density for every layer.

Özdenizci and Legenstein, "Training adversarially robust sparse networks via Bayesian connectivity
sampling", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from equipoise.errors import UserError


def weighted_layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """The convolutions and linear layers by name, in order; their weights are what is made sparse."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}


def he_initialise(model: nn.Module) -> None:
    """Weights from N(0, 2/fan_in), biases zero (He et al. 2015).

    BSR-Net's TensorFlow initialiser has this variance too, but cuts the normal's tails at two deviations.
    """
    for layer in weighted_layers(model).values():
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def half(density: float) -> float:
    """p/2, the initial density of the large layers for a target density p."""
    if not 0 < density <= 1:
        raise UserError(f"density is {density}; it must be above 0 and at most 1")
    return density / 2


def by_stage(model: nn.Module, densities: Mapping[str, float]) -> dict[str, float]:
    """A density for every conv and linear weight, given one for each child of the model that has any."""
    return {f"{name}.weight": densities[name.partition(".")[0]] for name in weighted_layers(model)}
