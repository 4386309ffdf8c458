"""Packed files of custom models: weights coded as in `packed_file`, without a description of the model."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.checks import as_path
from equipoise.deploy.coding import VALUES, decode_all, encode
from equipoise.deploy.packed_file import read_file, write_file, written
from equipoise.errors import UserError
from equipoise.modules import require_model
from equipoise.runtime.packed_arrays import VERSION, WEIGHTS
from equipoise.storage.pack import unpack
from equipoise.topology.selection import unwrap

# What writes the files that are named so
OTHERS = {
    ".onnx": "`equipoise export RUN {name}`, or torch.onnx.export of the dense model",
    ".c": "`equipoise export RUN {name}`",
    ".pt": "torch.save",
    ".pth": "torch.save",
}


def save(model: nn.Module, path: str | os.PathLike[str], values: str = "float32", force: bool = False) -> None:
    """Write the weights of any model to a small file, for `equipoise.load(path, into=model)`.

    The file is written whole or not at all. Weights are stored as their nonzeros, everything else of the `state_dict`
    as it is.

    Args:
        model: A packed, masked or dense model.
        path: The file, such as `net.safetensors`.
        values: Type of the stored weights: `float32`, `bf16` or `int8`.
        force: Whether to overwrite an existing file.

    Raises:
        UserError: If the file exists, is named like one of another format or cannot be written, or if the model has
            values that are not finite.
    """
    require_model("save(model, path)", model)
    path = as_path(path)
    VALUES[values]
    if path.suffix in OTHERS:
        maker = OTHERS[path.suffix].format(name=path.name)
        raise UserError(
            f"save writes safetensors: name the file {path.stem}.safetensors, or write {path.name} with {maker}"
        )
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists; force=True overwrites it")
    inner = unwrap(model)
    buffers = {name for name, _ in inner.named_buffers()}
    state = unpack(inner)[0]
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f'"{name}" of the state_dict is not a tensor and cannot be saved')
        coded = _coded(name, tensor.detach().to("cpu", copy=True), "float32" if name in buffers else values)
        if clash := next((key for key in coded if key != name and key in state), None):
            raise UserError(f'"{clash}" is the name of a part of "{name}" in the file; rename it')
        tensors |= coded
    with written(path) as temporary:
        write_file(temporary, WEIGHTS, {"version": VERSION, "digest": ""}, tensors)


def _coded(name: str, tensor: Tensor, values: str) -> dict[str, Tensor]:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise UserError(f'"{name}" is not finite; there is nothing to deploy')
    if tensor.dim() < 2 or tensor.dtype != torch.float32:
        return {name: tensor.contiguous()}
    return {f"{name}/{part}": coded for part, coded in encode(tensor, values).items()}


def read_custom(path: Path, model: nn.Module) -> nn.Module:
    """Return a copy of `model` with the weights of a file, in eval mode on the CPU. No code in the file is executed.

    Raises:
        UserError: If the file is damaged or belongs to another model.
    """
    require_model("load(path, into=model)", model)
    _, tensors = read_file(path, WEIGHTS)
    new = copy.deepcopy(unwrap(model)).cpu()
    try:
        new.load_state_dict(decode_all(tensors, {name: tuple(t.shape) for name, t in new.state_dict().items()}))
    except (RuntimeError, UserError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{path} does not fit this model, as it was before packing: {line}") from None
    return new.eval().requires_grad_(False)
