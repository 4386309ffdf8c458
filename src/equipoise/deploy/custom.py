"""The packed file of a model of one's own: weights coded as in `packed`, without a word about the model."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from equipoise.deploy.coding import VALUES, decode, encode
from equipoise.deploy.packed_file import VERSION, WEIGHTS, read_file, write_file
from equipoise.errors import UserError
from equipoise.files import written_whole
from equipoise.storage.pack import unpack
from equipoise.topology.selection import unwrap


def save(model: nn.Module, path: str | os.PathLike[str], values: str = "float32", force: bool = False) -> None:
    """Write the weights of any model to a small file, for `equipoise.load(path, into=model)`.

    Weights are stored as their nonzeros in float32, bf16 or int8 (`values`), whether the model is packed, masked or
    dense; everything else of its `state_dict` as it is. No file is written over unless `force` says so, and one is
    there whole or not at all.
    """
    path = Path(path)
    VALUES[values]
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists; force=True writes over it")
    inner = unwrap(model)
    buffers = {name for name, _ in inner.named_buffers()}
    state = unpack(inner)[0]
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f'"{name}" of the state_dict is no tensor, and cannot be saved')
        coded = _coded(name, tensor.detach().to("cpu", copy=True), "float32" if name in buffers else values)
        if clash := next((key for key in coded if key != name and key in state), None):
            raise UserError(f'"{clash}" is what a part of "{name}" is called in the file; give it another name')
        tensors |= coded
    try:
        with written_whole(path) as temporary:
            write_file(temporary, WEIGHTS, {"version": VERSION, "digest": ""}, tensors)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {path}: {getattr(error, 'strerror', None) or error}") from None


def _coded(name: str, tensor: Tensor, values: str) -> dict[str, Tensor]:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise UserError(f'"{name}" is not finite; there is nothing to deploy')
    if tensor.dim() < 2 or tensor.dtype != torch.float32:
        return {name: tensor.contiguous()}
    return {f"{name}/{part}": coded for part, coded in encode(tensor, values).items()}


def read_own(path: Path, model: nn.Module) -> nn.Module:
    """A copy of the model with the weights of a file, in eval mode on the CPU. Nothing in the file is executed."""
    _, tensors = read_file(path, WEIGHTS)
    new = copy.deepcopy(unwrap(model)).cpu()
    try:
        new.load_state_dict(_decoded(tensors, {name: tensor.shape for name, tensor in new.state_dict().items()}))
    except (RuntimeError, UserError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not of this model, as it was before packing: {line}") from None
    return new.eval().requires_grad_(False)


def _decoded(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    coded: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        if name and key not in shapes:  # a module may have a slash in its own name
            coded.setdefault(name, {})[part] = tensor
        else:
            state[key] = tensor
    for name, parts in coded.items():
        if name not in shapes:
            raise UserError(f'it has no weight "{name}"')
        state[name] = decode(parts, tuple(shapes[name]))
    return state
