"""The packed file: a safetensors file with coded weights, and a header that says how to make the model of them.

The header is JSON in the metadata, under `equipoise`: see `Header`. Tensors: one for each bias and each norm, and
`NAME/values`, `NAME/gaps` and `NAME/scale` for each weight (see `coding`). Reading one executes nothing: the model is
looked up by its name in the catalogue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from equipoise.config import build
from equipoise.deploy.blueprint import Blueprint, Network
from equipoise.deploy.coding import decode, encode
from equipoise.deploy.fold import fold, restructure
from equipoise.errors import UserError

KEY = "equipoise"
WEIGHTS = "equipoise-weights"  # of a model that is not in the catalogue: see `own`
VERSION = 1


@dataclass(frozen=True)
class Header:
    """version: of this format. network: which model. folded: norms, and the layers they went into. digest: a checksum
    over everything else in the file.
    """

    version: int
    network: Blueprint
    folded: Mapping[str, str]
    digest: str = ""


@dataclass(frozen=True)
class Unpacked:
    """What a packed file holds: the dense model with its norms folded, in eval mode, and how it is described."""

    blueprint: Blueprint
    model: nn.Module
    stored: int  # numbers in the file that a model is made of


def write_packed(network: Network, path: Path, values: str = "float32") -> None:
    """Write a network with its weights in float32, bf16 or int8; biases and norms are always float32."""
    model = network.build()
    header = Header(VERSION, network.blueprint, fold(model))
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            tensors[name] = parameter.detach().clone()
        else:
            tensors |= {f"{name}/{part}": tensor for part, tensor in encode(parameter, values).items()}
    write_file(path, KEY, asdict(header), tensors)


def read_packed(path: Path) -> Unpacked:
    """Read what `write_packed` wrote. No code is executed; a file that is not right in every part is refused."""
    header, tensors = read_file(path, KEY)
    try:
        return _unpack(build(Header, header, "header"), tensors)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def write_file(path: Path, key: str, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write tensors with a header that has their checksum."""
    signed = {**header, "digest": digest(header, tensors)}
    save_file(tensors, path, metadata={key: json.dumps(signed)})  # one entry: safetensors mixes the order of several


def read_file(path: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that is whole and of the version that is known."""
    try:
        with safe_open(path, framework="pt") as file:
            header = _parse_header(path, file.metadata() or {}, key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except Exception as error:  # safetensors has no one base for what it and torch raise on damaged files
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is {_what(path, line)}; {_maker(path, key)}") from None
    if header.get("digest") != digest(header, tensors):
        raise UserError(f"{path} is damaged: its checksum does not match")
    return header, tensors


def _parse_header(path: Path, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    if key not in metadata:
        raise UserError(f"{path} is {_instead(path, metadata, key)}")
    try:
        header = json.loads(metadata[key])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("version"), int):
        raise UserError(f"{path} is damaged: its header is not JSON with a version")
    if header["version"] != VERSION:
        raise UserError(f"{path} is of version {header['version']}; this equipoise reads version {VERSION}")
    return header


def _instead(path: Path, metadata: Mapping[str, str], key: str) -> str:
    """What a file is that is not what it was taken for, and what to do with it."""
    if WEIGHTS in metadata:
        return f'of a model of one\'s own, which it does not describe: load("{path.name}", into=model)'
    if KEY in metadata:
        return f'of a model that it describes itself: load("{path.name}") without `into`'
    return f"not a packed network; {_maker(path, key)}"


def _what(path: Path, reason: str) -> str:
    """What a path leads to that cannot be read."""
    if path.is_dir():
        return "a folder, not the file of a packed network"
    if path.suffix == ".onnx":
        return "named as an ONNX model, which other programs read, and not a packed network"
    return f"damaged or not a packed network ({reason})"


def _maker(path: Path, key: str) -> str:
    """How to come by a file of the wanted kind."""
    name = "FILE.safetensors" if path.is_dir() or path.suffix == ".onnx" else path.name
    makes = f"`equipoise export RUN {name}`" if key == KEY else f'equipoise.save(model, "{name}")'
    return f"{makes} makes one"


def _unpack(header: Header, tensors: Mapping[str, Tensor]) -> Unpacked:
    blueprint = header.network
    model = blueprint.skeleton()
    restructure(model, header.folded)
    coded: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        if name:
            coded.setdefault(name, {})[part] = tensor
        elif tensor.dtype is torch.float32 and tensor.isfinite().all():
            weights[key] = tensor
        else:
            raise UserError(f'"{key}" is {tensor.dtype}; biases and norms are finite float32')
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, parts in coded.items():
        weights[name] = _decode(name, parts, shapes)
    stored = sum(tensor.numel() for key, tensor in tensors.items() if not key.endswith("/gaps"))
    return Unpacked(blueprint, blueprint.fill(model, weights), stored)


def _decode(name: str, parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    if len(shapes.get(name, ())) < 2:
        raise UserError(f'the model has no weight "{name}"')
    try:
        return decode(parts, shapes[name])
    except UserError as error:
        raise UserError(f'"{name}": {error}') from None


def digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum over everything that is read: the header, and the tensors' names, types, shapes and bytes."""
    said = json.dumps({**header, "digest": ""}, sort_keys=True)
    sum_ = hashlib.blake2b(said.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sum_.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sum_.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sum_.hexdigest()
