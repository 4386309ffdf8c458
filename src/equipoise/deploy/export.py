"""Export a network to a packed file, C source, ONNX or a plain state_dict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from equipoise.catalogue import Catalogue
from equipoise.deploy import onnx_model
from equipoise.deploy.blueprint import Network
from equipoise.deploy.c_source import VALUE_TYPES, write_c
from equipoise.deploy.coding import VALUES
from equipoise.deploy.fold import fold
from equipoise.deploy.packed_file import write_packed, written
from equipoise.deploy.two_to_four import check_gpu, write_semi_structured
from equipoise.errors import UserError
from equipoise.scores import SCORES
from equipoise.tensor_files import save_file


def write_onnx(network: Network, path: Path) -> None:
    """Write ONNX with norms folded and dense weights, zeros included, for any number of images."""
    model = network.build()
    fold(model)
    onnx_model.write_model(model, network.blueprint.input_shape, path)


def write_state_dict(network: Network, path: Path) -> None:
    """Write the state_dict with its usual keys and norms as trained, for `load_state_dict`."""
    network.build()  # raises if the weights do not fit the model
    save_file(network.state, path, metadata={"network": json.dumps(asdict(network.blueprint))})


FORMATS: Catalogue[Callable[..., None]] = Catalogue(
    "format",
    {
        "packed": write_packed,
        "2:4": write_semi_structured,
        "c": write_c,
        "onnx": write_onnx,
        "state_dict": write_state_dict,
    },
)
# Types of the weights that formats store, if not only float32; the first is the default
VALUES_OF = {"packed": tuple(VALUES), "2:4": ("bf16",), "c": tuple(VALUE_TYPES)}


SUFFIXES = {".safetensors": ("packed", "state_dict", "2:4"), ".onnx": ("onnx",), ".c": ("c",)}
"""The formats that files of a suffix have; the first is the default."""


def format_of(path: Path, form: str | None = None) -> str:
    """Return the format of a file to write: `form`, or that of its suffix; without a suffix `packed`.

    Raises:
        UserError: If the suffix and `form` contradict each other, or the suffix is unknown and there is no `form`.
    """
    known = SUFFIXES.get(path.suffix)
    if form is not None:
        FORMATS[form]
        if known is not None and form not in known:
            raise UserError(f"{path.name} is the name of a file in the format {known[0]}, not {form}; rename it")
        return form
    if path.suffix and known is None:
        raise UserError(
            f"the suffix of {path.name} tells no format; use {' or '.join(SUFFIXES)}, or name one with --format"
        )
    return "packed" if known is None else known[0]


def export(
    network: Network, path: Path, form: str = "packed", values: str | None = None, force: bool = False
) -> None:
    """Write a network to a file, whole or not at all.

    Args:
        network: The network.
        path: The file.
        form: `packed`, `2:4`, `c`, `onnx` or `state_dict`.
        values: Type of the weights: `float32`, the default; `int8` for packed files and C source; `bf16` for packed
            files and `2:4`, which has no other.
        force: Whether to overwrite an existing file.

    Raises:
        UserError: If the request is wrong or the file cannot be written.
    """
    check_request(path, form, values, force=force)
    with written(path) as temporary:
        FORMATS[form](network, temporary, *([values or VALUES_OF[form][0]] if form in VALUES_OF else []))


def check_request(
    path: Path, form: str = "packed", values: str | None = None, weights: str = "plain", force: bool = False
) -> None:
    """Raise a `UserError` for a request that cannot be fulfilled, before any work is done for it."""
    FORMATS[form]
    if values is not None and VALUES[values] and values not in (stored := VALUES_OF.get(form, ("float32",))):
        raise UserError(f"{form} stores {' or '.join(stored)}; --format packed has {values} values")
    if form == "2:4":
        check_gpu()
    if form == "onnx":
        onnx_model.check_installed()
    check_weights(weights)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file, such as {path / 'out.safetensors'}")
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists; --force overwrites it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}")


def check_weights(weights: str) -> None:
    """Raise a `UserError` unless a network is scored with weights of this name."""
    if weights not in SCORES:
        raise UserError(f'no weights are called "{weights}"; choose from {", ".join(SCORES)}')
