"""From a run to a file: packed, ONNX or a plain state_dict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from equipoise.catalogue import Catalogue
from equipoise.config import parameters_of
from equipoise.data import FolderLoader
from equipoise.deploy import onnx_model
from equipoise.deploy.coding import VALUES
from equipoise.deploy.fold import fold
from equipoise.deploy.network import Blueprint, Network
from equipoise.deploy.packed import write_packed
from equipoise.errors import UserError
from equipoise.files import written_whole
from equipoise.models import MODELS
from equipoise.sparse import unpack
from equipoise.topology.layers import unwrap
from equipoise.train.evaluate import three_ways
from equipoise.train.loop import Trainer
from equipoise.train.parts import autocast

WAYS = ("plain", "reestimated", "averaged")


def write_onnx(network: Network, path: Path) -> None:
    """ONNX with norms folded and dense weights, zeros included, for any number of images."""
    model = network.build()
    fold(model)
    onnx_model.write_model(model, network.blueprint.input_shape, path)


def write_state_dict(network: Network, path: Path) -> None:
    """The state_dict with its usual keys, norms as trained, for `load_state_dict`."""
    network.build()  # refuses what no model can be made of
    save_file(dict(network.state), path, metadata={"network": json.dumps(asdict(network.blueprint))})


FORMATS: Catalogue[Callable[..., None]] = Catalogue(
    "format", {"packed": write_packed, "onnx": write_onnx, "state_dict": write_state_dict}
)


def export(network: Network, path: Path, form: str = "packed", values: str = "float32", force: bool = False) -> None:
    """Write a network; the file is there whole or not at all, and none is written over unless `force` says so."""
    check_request(path, form, values, force=force)
    write = FORMATS[form]
    try:
        with written_whole(path) as temporary:
            if form == "packed":
                write(network, temporary, values)
            else:
                write(network, temporary)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {path}: {getattr(error, 'strerror', None) or error}") from None


def check_request(
    path: Path, form: str = "packed", values: str = "float32", weights: str = "plain", force: bool = False
) -> None:
    """Refuse what cannot be written, before any work is done for it."""
    FORMATS[form], VALUES[values]
    if form != "packed" and values != "float32":
        raise UserError(f"{form} holds float32; only the packed format has {values} values")
    if form == "onnx":
        onnx_model.check_installed()
    _check_weights(weights)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, such as {path / 'out.safetensors'}")
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists; --force writes over it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}")


# From a run


def network_of(trainer: Trainer, weights: str = "plain") -> Network:
    """The run's network with the weights and statistics of one of the three ways that runs are scored."""
    _check_weights(weights)
    parts = trainer.parts
    if weights == "averaged" and parts.average is None:
        raise UserError("the run keeps no average of its weights (average=0); export its plain weights")
    precision = partial(autocast, trainer.recipe, parts.device)
    with closing(three_ways(parts.model, trainer.fresh_images, parts.average, precision)) as ways:
        next(way for way in ways if way == weights)
        state = _state(unwrap(parts.model))
    return Network(_blueprint(trainer), state)


def _check_weights(weights: str) -> None:
    if weights not in WAYS:
        raise UserError(f'no weights are called "{weights}"; there is {", ".join(WAYS)}')


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
