"""Pretrained weights of a run. Reading them executes no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.deploy.coding import decode_all
from equipoise.deploy.packed_file import Unpacked, read_file, read_packed
from equipoise.errors import UserError
from equipoise.models import Normalize
from equipoise.runtime.packed_arrays import KEY, WEIGHTS

State = dict[str, Tensor]


def load_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file.

    Args:
        model: The model; it is dense, and its weights may become zero.
        path: A state_dict that `torch.save` wrote, or a safetensors file: a state_dict, a file of `equipoise.save`,
            or one of `equipoise export`. An exported network has its norms folded into the layers before them. They
            start as identities then, and the model computes the same function in evaluation mode.

    Raises:
        UserError: If there is no such file, if it is of another kind, or if it does not fit the model.
    """
    if not path.is_file():
        raise UserError(f"weights: there is no file {path}")
    try:
        exported = read_packed(path) if _kind(path) == KEY else None
        state = _read(path, model) if exported is None else _unfold(exported, model)
        _check(state, model)
    except UserError as error:
        raise UserError(f"weights: {error}") from None
    model.load_state_dict(state, strict=False)
    if exported is not None:
        for module in model.modules():
            if isinstance(module, Normalize):
                module.set(exported.blueprint.mean, exported.blueprint.std)


def _kind(path: Path) -> str:
    """Whether a file is exported (`KEY`), of `equipoise.save` (`WEIGHTS`), safetensors or a pickle."""
    if path.suffix != ".safetensors":
        return "pickle"
    try:
        with safe_open(path, framework="pt") as file:
            return next((key for key in (KEY, WEIGHTS) if key in (file.metadata() or {})), "safetensors")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from None


def _read(path: Path, model: nn.Module) -> State:
    match _kind(path):
        case "pickle":
            return _read_pickle(path)
        case "safetensors":
            return load_file(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return decode_all(read_file(path, WEIGHTS)[1], shapes)


def _read_pickle(path: Path) -> State:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise UserError(f"{path} holds more than tensors, or is damaged; save model.state_dict()") from None
    except Exception as error:  # torch raises exceptions without a common base on damaged files
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
    if isinstance(found, Mapping):
        found = found.get("state_dict", found)  # checkpoints of Lightning and timm
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{path} is not a state_dict: names and tensors; save model.state_dict()")
    return dict(found)


def _unfold(file: Unpacked, model: nn.Module) -> State:
    """The state_dict of a model with norms that computes what a network without them does in evaluation mode."""
    state = {name: parameter.detach() for name, parameter in file.model.named_parameters()}
    biases = {name for name in model.state_dict() if name.endswith(".bias")}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        zeros, ones = torch.zeros(module.num_features), torch.ones(module.num_features)
        if layer := file.folded.get(name):
            bias = f"{layer}.bias"
            state[f"{name}.weight"] = ones
            state[f"{name}.bias"] = zeros if bias in biases else state.pop(bias)
        if f"{name}.weight" in state:
            state[f"{name}.weight"] = state[f"{name}.weight"] * (1 + module.eps) ** 0.5
        state |= {f"{name}.running_mean": zeros, f"{name}.running_var": ones}
    return state


def _check(state: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a state with other names or shapes than the model, or with numbers that are not finite."""
    expected = model.state_dict()
    optional = {name for name in expected if name.endswith("num_batches_tracked")}
    if missing := expected.keys() - state.keys() - optional:
        raise UserError(f'the model has "{min(missing)}" and the file has not')
    if unknown := state.keys() - expected.keys():
        raise UserError(f'the file has "{min(unknown)}" and the model has not')
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            there, here = tuple(tensor.shape), tuple(expected[name].shape)
            raise UserError(f'"{name}" has the shape {there} in the file and {here} in the model')
        if not tensor.isfinite().all():
            raise UserError(f'"{name}" has numbers that are not finite')
