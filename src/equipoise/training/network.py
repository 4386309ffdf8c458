"""The network of a run, as it is exported."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.config import parameters_of
from equipoise.data import FolderLoader
from equipoise.deploy.blueprint import Blueprint, Network
from equipoise.deploy.export import check_weights
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.storage.pack import unpack
from equipoise.topology.selection import unwrap
from equipoise.training.evaluate import three_ways
from equipoise.training.precision import autocast
from equipoise.training.trainer import Trainer


def network_of(trainer: Trainer, weights: str = "plain") -> Network:
    """The run's network with the weights and statistics of one of the three ways that runs are scored."""
    check_weights(weights)
    parts = trainer.parts
    if weights == "ema" and parts.ema is None:
        raise UserError("the run keeps no average of its weights (ema=0); export its plain weights")
    precision = partial(autocast, trainer.recipe.precision, parts.device)
    with closing(three_ways(parts.model, trainer.recalibration_images, parts.ema, precision)) as ways:
        next(way for way in ways if way == weights)
        state = _state(unwrap(parts.model))
    return Network(_blueprint(trainer), state)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict with its usual keys, whichever way the weights are stored, as a copy on the CPU."""
    state, _ = unpack(model)
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


@torch.no_grad()
def _blueprint(trainer: Trainer) -> Blueprint:
    """The model's options as the run found them from its data."""
    recipe, parts = trainer.recipe, trainer.parts
    model, loader = unwrap(parts.model), parts.loaders["test"]
    images = (3, loader.size, loader.size) if isinstance(loader, FolderLoader) else loader.batch(0, 0)[0].shape[1:]
    flags = {module: module.training for module in model.modules()}
    classes = model.eval()(torch.zeros(1, *images, device=parts.device)).shape[1]
    for module, flag in flags.items():
        module.training = flag
    options: dict[str, Any] = {"classes": classes, "channels": images[0]}
    if "size" in parameters_of(MODELS[recipe.model]) and not isinstance(loader, FolderLoader):
        options["size"] = images[-1]
    buffers = dict(model.named_buffers())  # under their names in a packed model too, whose modules are others
    mean, std = (tuple(buffers[f"normalize.{name}"].flatten().tolist()) for name in ("mean", "std"))
    return Blueprint(recipe.model, options | dict(recipe.model_options), tuple(images), mean, std)
