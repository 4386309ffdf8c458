"""Read a packed file as numpy arrays, and decode its weights, without torch.

The format is that of safetensors: the length of a JSON table in 8 bytes, the table, and the bytes of the tensors. The
table is checked before an array is made of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError

KEY = "equipoise"  # of the header in the metadata
WEIGHTS = "equipoise-weights"  # of the header in the files of `equipoise.save`
VERSION = 1
LARGEST_TABLE = 100_000_000  # bytes, as in safetensors
# Types in packed files: their names in safetensors, in checksums, and in numpy. numpy has no bf16.
TYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F32": ("torch.float32", np.dtype(np.float32)),
    "BF16": ("torch.bfloat16", np.dtype(np.uint16)),
    "I32": ("torch.int32", np.dtype(np.int32)),
    "I8": ("torch.int8", np.dtype(np.int8)),
    "U8": ("torch.uint8", np.dtype(np.uint8)),
    "U16": ("torch.uint16", np.dtype(np.uint16)),
}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its type in safetensors, and its numbers, bf16 as their bits."""

    kind: str
    array: NDArray[Any]

    def content(self) -> tuple[str, Sequence[int], memoryview]:
        """Return type, shape and bytes, for the checksum."""
        return TYPES[self.kind][0], self.array.shape, self.array.reshape(-1).view(np.uint8).data

    def integers(self) -> NDArray[Any]:
        """Return the numbers of a part of indices, as float32 if they are bf16, which no part may be."""
        return self.floats("indices") if self.kind == "BF16" else self.array

    def floats(self, name: str) -> NDArray[np.float32]:
        """Return the numbers as float32.

        Raises:
            UserError: If they are neither float32, bf16 nor int8, or not finite.
        """
        if self.kind not in ("F32", "BF16", "I8"):
            raise UserError(f'"{name}" must be float32, bf16 or int8, not {self.kind}')
        bits = self.array.astype(np.uint32) << 16 if self.kind == "BF16" else None
        numbers = self.array.astype(np.float32) if bits is None else bits.view(np.float32)
        if not np.isfinite(numbers).all():
            raise UserError(f'"{name}" has values that are not finite')
        return numbers


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the header and the tensors of a file that `equipoise export` wrote.

    Raises:
        UserError: If the file is missing, damaged, of another version or of another kind.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    table, begin = _table(path, data)
    header = _header(path, table.pop("__metadata__", None))
    stored: dict[str, Stored] = {}
    end = 0
    for name, entry in sorted(table.items(), key=lambda item: _offsets(path, item[1])):
        first, end = _next(path, entry, end)
        if begin + end > len(data):
            _damaged(path, "it is too short")
        kind = TYPES[entry["dtype"]][1]
        array = np.frombuffer(data[begin + first : begin + end], kind)
        stored[name] = Stored(entry["dtype"], array.reshape(entry["shape"]))
    if begin + end != len(data):
        _damaged(path, "the tensors do not fill it")
    contents = {name: one.content() for name, one in stored.items()}
    if header.get("digest") != checksum(header, contents):
        _damaged(path, "its checksum does not match")
    return header, stored


def _damaged(path: Path, reason: str) -> NoReturn:
    raise UserError(f"{path} is damaged or not a packed network ({reason}); `equipoise export` writes one")


def _table(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON table at the beginning of a file, and the index at which it ends."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, LARGEST_TABLE):
        _damaged(path, "it is too short")
    try:
        table = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        _damaged(path, "it does not begin with a table of tensors")
    return table, 8 + length


def _header(path: Path, metadata: Any) -> dict[str, Any]:
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    if isinstance(metadata, dict) and WEIGHTS in metadata:
        raise UserError(
            f'{path} has the weights of a custom model, without a program: equipoise.load("{path.name}", into=model) '
            f"loads it, and `equipoise export RUN FILE.safetensors` writes a file for the runtime"
        )
    if not isinstance(text, str):
        _damaged(path, "it has no header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("version"), int):
        _damaged(path, "its header is not JSON with a version")
    if header["version"] != VERSION:
        raise UserError(f"{path} is of version {header['version']}; this equipoise reads version {VERSION}")
    return header


def _offsets(path: Path, entry: Any) -> list[int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        _damaged(path, "a tensor has no offsets")
    return offsets


def _next(path: Path, entry: Mapping[str, Any], end: int) -> tuple[int, int]:
    """The begin and the end of a tensor, which must follow the tensor before it and be as long as its shape says."""
    first, last = _offsets(path, entry)
    kind, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(kind, str) or kind not in TYPES:
        _damaged(path, "it has a tensor of another type")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 8:
        _damaged(path, "a tensor has no shape")
    if first != end or last - first != math.prod(shape) * TYPES[kind][1].itemsize:
        _damaged(path, "a tensor does not have the size of its shape")
    return first, last


def checksum(header: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int], memoryview]]) -> str:
    """Return a checksum of a header, without its `digest`, and of the types, shapes and bytes of tensors by name."""
    found = hashlib.blake2b(json.dumps({**header, "digest": ""}, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        kind, shape, content = tensors[name]
        found.update(json.dumps([name, kind, list(shape)]).encode())
        found.update(content)
    return found.hexdigest()
