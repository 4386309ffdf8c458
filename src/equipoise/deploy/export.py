"""From a run to a file: packed, ONNX or a plain state_dict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from equipoise.catalogue import Catalogue
from equipoise.deploy import onnx_model
from equipoise.deploy.blueprint import Network
from equipoise.deploy.coding import VALUES
from equipoise.deploy.fold import fold
from equipoise.deploy.packed_file import write_packed
from equipoise.errors import UserError
from equipoise.files import written_whole
from equipoise.scores import SCORES


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
    check_weights(weights)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, such as {path / 'out.safetensors'}")
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists; --force writes over it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}")


def check_weights(weights: str) -> None:
    if weights not in SCORES:
        raise UserError(f'no weights are called "{weights}"; there is {", ".join(SCORES)}')
