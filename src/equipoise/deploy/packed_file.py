"""The packed file: a safetensors file with coded weights and a header that describes the model.

The header is JSON in the metadata, under `equipoise`: see `Header`. Biases and norms are tensors of their names. A
weight is stored as `NAME/values`, its indices as `NAME/gaps` or `NAME/bitmap`, and `NAME/block` and `NAME/scale` if it
has them (see `coding`). Reading a file executes no code from it: the model is looked up in the catalogue by its name.
`equipoise.runtime` needs no catalogue: it executes the calls in the header, whose constants are tensors named
`program/NUMBER/scale` and `program/NUMBER/shift`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from equipoise.catalogue import names_code
from equipoise.config import build
from equipoise.deploy.blueprint import Blueprint, Network, foreign_buffers
from equipoise.deploy.coding import decode_all, encode
from equipoise.deploy.fold import fold, restructure
from equipoise.deploy.graph import read_graph
from equipoise.errors import UserError
from equipoise.files import written_whole
from equipoise.models import MODELS
from equipoise.runtime.calls import PREFIX
from equipoise.runtime.indices import INDICES
from equipoise.runtime.packed_arrays import KEY, VERSION, WEIGHTS, checksum
from equipoise.tensor_files import save_file


@dataclass(frozen=True)
class Header:
    """Header of a packed file.

    Args:
        version: Version of the format.
        network: The model.
        folded: Names of folded norms, and of the layers they were folded into.
        program: The calls of the network for the runtime without torch, see `Calls`; `None` if it has operations that
            the runtime does not have.
        digest: Checksum of everything else in the file.
        semi_structured: Names of the layers that run with semi-structured tensors on a GPU.
    """

    version: int
    network: Blueprint
    folded: Mapping[str, str]
    program: Mapping[str, Any] | None = None
    digest: str = ""
    semi_structured: Sequence[str] = ()


@dataclass(frozen=True)
class Unpacked:
    """Content of a packed file.

    Args:
        blueprint: Description of the model.
        model: The dense model in eval mode, with its norms folded.
        folded: Names of folded norms, and of the layers they were folded into.
        stored: Values and scales in the file.
        semi_structured: Names of the layers that run with semi-structured tensors on a GPU; empty for a CPU.
    """

    blueprint: Blueprint
    model: nn.Module
    folded: Mapping[str, str]
    stored: int
    semi_structured: Sequence[str] = ()


def write_packed(network: Network, path: Path, values: str = "float32", semi_structured: Sequence[str] = ()) -> None:
    """Write a network to a packed file.

    Args:
        network: Blueprint and state_dict.
        path: The file.
        values: Type of the weights: `float32`, `bf16` or `int8`. Biases and norms are always float32.
        semi_structured: Names of the layers that run with semi-structured tensors on a GPU.

    Raises:
        UserError: If the weights do not fit the model or are not finite.
    """
    model = network.build()
    if foreign := foreign_buffers(model):
        raise UserError(f'"{foreign[0]}" is a buffer, which packed files do not store; use --format state_dict')
    folded = fold(model)
    program, tensors = _program(model, network.blueprint.input_shape)
    header = asdict(Header(VERSION, network.blueprint, folded, program, semi_structured=semi_structured))
    if not semi_structured:
        del header["semi_structured"]  # other files stay as they were
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            tensors[name] = parameter.detach().clone()
        else:
            tensors |= {f"{name}/{part}": tensor for part, tensor in encode(parameter, values).items()}
    write_file(path, KEY, header, tensors)


def _program(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """The calls of a model and their constants; none if the runtime cannot execute the model."""
    try:
        graph = read_graph(model, input_shape)
    except UserError:
        return None, {}
    parameters = {name for name, _ in model.named_parameters()}
    return (graph.calls.plain(), dict(graph.constants)) if graph.weights.keys() <= parameters else (None, {})


def read_packed(path: Path, allow_code: bool = False) -> Unpacked:
    """Read a file that `write_packed` wrote, without executing any code from it.

    Args:
        path: The file.
        allow_code: Whether to import a custom model that the file names, such as `package.nets:Net`.

    Raises:
        UserError: If the file is missing, damaged, of another version or of another kind.
    """
    header, tensors = read_file(path, KEY)
    try:
        known = build(Header, header, "header")
        if allow_code and names_code(known.network.model):
            MODELS.import_code(known.network.model)
        return _unpack(known, tensors)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary file that takes the place of `path` when it is complete.

    Raises:
        UserError: If the file cannot be written.
    """
    try:
        with written_whole(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {path}: {getattr(error, 'strerror', None) or error}") from None


def write_file(path: Path, key: str, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write tensors and a header with their checksum."""
    signed = {**header, "digest": digest(header, tensors)}
    save_file(tensors, path, metadata={key: json.dumps(signed)})  # one entry: safetensors mixes the order of several


def read_file(path: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read header and tensors of a file, and check its version and its checksum.

    Args:
        path: The file.
        key: Key of the header in the metadata: `KEY` or `WEIGHTS`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = _parse_header(path, file.metadata() or {}, key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except Exception as error:  # safetensors and torch raise exceptions without a common base on damaged files
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
    """Kind of a file that has another header, and how to use it."""
    if WEIGHTS in metadata:
        command = f"equipoise bench {path.name} model=package.nets:Net --shape 3x32x32"
        return f'the file of a custom model, without a description: load("{path.name}", into=model), or `{command}`'
    if KEY in metadata:
        return f'a packed network with a description: load("{path.name}") without `into`'
    return f"not a packed network; {_maker(path, key)}"


def _what(path: Path, reason: str) -> str:
    """Kind of a file that safetensors cannot read."""
    if path.is_dir():
        return "a folder, not the file of a packed network"
    if path.suffix == ".onnx":
        return "named like an ONNX model, not a packed network"
    return f"damaged or not a packed network ({reason})"


def _maker(path: Path, key: str) -> str:
    """Command that writes a file of the wanted kind."""
    name = "FILE.safetensors" if path.is_dir() or path.suffix == ".onnx" else path.name
    command = f"`equipoise export RUN {name}`" if key == KEY else f'equipoise.save(model, "{name}")'
    return f"{command} writes one"


def _unpack(header: Header, tensors: Mapping[str, Tensor]) -> Unpacked:
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    blueprint = header.network
    model = blueprint.skeleton()
    restructure(model, header.folded)
    for key, tensor in tensors.items():
        if "/" not in key and (tensor.dtype is not torch.float32 or not tensor.isfinite().all()):
            raise UserError(f'"{key}" is {tensor.dtype}; biases and norms are finite float32')
    weights = decode_all(tensors, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    model = blueprint.fill(model, weights)
    return Unpacked(blueprint, model, header.folded, stored_values(tensors), header.semi_structured)


def stored_values(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of values and scales among the tensors of a file."""
    return sum(tensor.numel() for key, tensor in tensors.items() if key.rpartition("/")[2] not in INDICES)


def digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of a header and tensors, see `checksum`."""
    flat = {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data for name, tensor in tensors.items()}
    return checksum(header, {name: (str(t.dtype), t.shape, flat[name]) for name, t in tensors.items()})
