"""The network of a run, ready for export."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.data import Loader
from equipoise.data.folder_loader import EVALUATION_ZOOM
from equipoise.deploy.blueprint import Blueprint, Network
from equipoise.deploy.export import check_weights
from equipoise.errors import UserError
from equipoise.modules import preserved_modes
from equipoise.storage.pack import unpack
from equipoise.topology.selection import unwrap
from equipoise.training.build_model import options_of_data
from equipoise.training.evaluate import three_ways
from equipoise.training.precision import autocast
from equipoise.training.trainer import Trainer


def network_of(trainer: Trainer, weights: str = "plain") -> Network:
    """Return the network of a run.

    Args:
        trainer: The run, at the checkpoint to export.
        weights: The score whose weights and statistics are exported: `plain`, `bn_recalibrated` or `ema`.
    """
    check_weights(weights)
    parts = trainer.parts
    if weights == "ema" and parts.ema is None:
        raise UserError("the run has no averaged weights (ema=0); export its plain weights")
    precision = partial(autocast, trainer.recipe.precision, parts.device)
    with closing(three_ways(parts.model, trainer.recalibration_images, parts.ema, precision)) as scores:
        next(score for score in scores if score == weights)
        state = _state(unwrap(parts.model))
    return Network(_blueprint(trainer), state)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Copy the state_dict to the CPU, with the same keys in both storages."""
    state, _ = unpack(model)
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


@torch.no_grad()
def _blueprint(trainer: Trainer) -> Blueprint:
    """Collect the options that rebuild the model, including those that the run took from its data."""
    recipe, parts = trainer.recipe, trainer.parts
    model, loader = unwrap(parts.model), parts.loaders["test"]
    in_memory, images = isinstance(loader, Loader), tuple(loader.image_shape)
    with preserved_modes(model):
        classes = model.eval()(torch.zeros(1, *images, device=parts.device)).shape[1]
    options = options_of_data(recipe.model, classes, images[0], images[-1] if in_memory else None) | dict(
        recipe.model_options
    )
    buffers = dict(model.named_buffers())  # a packed model has other modules, but the same names of buffers
    named = (buffers.get(f"normalize.{name}", torch.empty(0)) for name in ("mean", "std"))  # empty: no such layer
    mean, std = (tuple(buffer.flatten().tolist()) for buffer in named)
    zoom = 1.0 if in_memory else EVALUATION_ZOOM
    return Blueprint(recipe.model, options, images, mean, std, parts.classes, zoom)
