"""The networks of the paper's experiments and two small ones, by name.

Every model takes `classes` and `channels`, expects pixels in [0, 1], normalises them in its first layer
(`normalize`) and returns logits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from equipoise.catalogue import Catalogue
from equipoise.models.normalize import Normalize
from equipoise.models.resnet import ResNet, resnet18, resnet34, resnet50
from equipoise.models.small_networks import mlp, small
from equipoise.models.vgg import vgg16, vgg_c
from equipoise.models.wide_resnet import WideResNet, wrn_28_4

MODELS: Catalogue[Callable[..., nn.Module]] = Catalogue(
    "model",
    {
        "small": small,
        "mlp": mlp,
        "vgg16": vgg16,
        "vgg_c": vgg_c,
        "resnet18": resnet18,
        "resnet34": resnet34,
        "resnet50": resnet50,
        "wrn_28_4": wrn_28_4,
    },
    group="models",
)

__all__ = [
    "MODELS",
    "Normalize",
    "ResNet",
    "WideResNet",
    "mlp",
    "resnet18",
    "resnet34",
    "resnet50",
    "small",
    "vgg16",
    "vgg_c",
    "wrn_28_4",
]
