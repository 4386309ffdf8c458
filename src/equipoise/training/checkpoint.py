"""Checkpoints: safetensors files that are written atomically and verified by a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equipoise.errors import UserError
from equipoise.files import flush, temporary_name, written_whole
from equipoise.tensor_files import save_file

VERSION = 2


class DamagedCheckpoint(UserError):
    """The file is truncated, modified or not a checkpoint."""


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values to a file, atomically."""
    tensors: dict[str, Tensor] = {}
    header = {"version": str(VERSION), "structure": json.dumps(_strip(state, "", tensors))}
    header["digest"] = _digest(header, tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_whole(path) as temporary:
            save_file(tensors, temporary, metadata=header)
    except (OSError, SafetensorError) as error:
        raise UserError(f"could not write the checkpoint {path}: {error}; earlier ones are intact") from None


def load(path: Path) -> dict[str, Any]:
    """Read a file that `save` wrote. No code is executed.

    Raises:
        DamagedCheckpoint: If the file is damaged or not a checkpoint.
        UserError: If there is no file, or if another version wrote it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged or not a checkpoint: {error}") from None
    if not {"version", "structure", "digest"} <= set(header):
        raise DamagedCheckpoint(f"{path} is not a checkpoint of equipoise")
    if header["digest"] != _digest(header, tensors):
        raise DamagedCheckpoint(f"{path} is damaged: its checksum does not match")
    if header["version"] != str(VERSION):
        raise UserError(f"{path} is a checkpoint of version {header['version']}; this equipoise reads {VERSION}")
    try:
        state: dict[str, Any] = _restore(json.loads(header["structure"]), tensors)
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not a checkpoint of equipoise: {error!r}") from None
    return state


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON in which tensors are replaced by their names and containers are tagged with their types."""
    match value:
        case Tensor():
            name = path
            while name in tensors:  # the key "a/b", and the key "b" inside "a"
                name += "'"
            # a copy, because tied weights share memory, which the format does not allow
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        case None | bool() | int() | float() | str():
            return value
        case Mapping() if all(isinstance(key, str | int) for key in value):
            return {"dict": [[key, _strip(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
        case list() | tuple():
            items = [_strip(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__} at {path or '/'}")


def _restore(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `_strip`."""
    match value:
        case {"tensor": str(path)}:
            return tensors[path]
        case {"dict": list(pairs)}:
            return {key: _restore(item, tensors) for key, item in pairs}
        case {"list": list(items)}:
            return [_restore(item, tensors) for item in items]
        case {"tuple": list(items)}:
            return tuple(_restore(item, tensors) for item in items)
    return value


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Hash everything that is read: version, structure, and the names, types, shapes and bytes of the tensors."""
    digest = hashlib.blake2b(f"{header['version']} {header['structure']}".encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Store:
    """The checkpoints of one run.

    Args:
        folder: The folder of the files.
        keep: Number of checkpoints that are kept, besides the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> None:
        """Write a checkpoint and remove old ones.

        The best checkpoint is written first under that name: a process that is killed before the checkpoint has its
        second name repeats the step, and no best checkpoint is lost.

        Args:
            step: The number of steps taken.
            state: The state of the run.
            best: Whether this is the best checkpoint so far.
        """
        path = self._path(step)
        if best:
            save(self.folder / "best.safetensors", state)
            self._link(self.folder / "best.safetensors", path)
        else:
            save(path, state)
        self.tidy(step)

    def tidy(self, step: int) -> None:
        """Remove all but the last checkpoints up to a step, and the temporary files of killed processes.

        Checkpoints of later steps were damaged, so the run repeats those steps. If there is no checkpoint of the step,
        nothing is removed.
        """
        paths, path = self.paths(), self._path(step)
        if path not in paths:
            return
        at = paths.index(path)
        for stale in (*paths[:at], *paths[at + self.keep :], *self.folder.glob(".*.tmp")):
            stale.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.safetensors"

    def _link(self, path: Path, other: Path) -> None:
        """Give a checkpoint a second name, without writing it a second time."""
        temporary = temporary_name(other)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without links
            with written_whole(other) as temporary:
                shutil.copyfile(path, temporary)
            return
        os.replace(temporary, other)
        flush(self.folder)

    def paths(self) -> list[Path]:
        """List the checkpoints, newest first."""
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)

    def newest(self) -> dict[str, Any] | None:
        """Load the newest valid checkpoint; damaged ones are skipped with a warning."""
        paths = self.paths()
        for i, path in enumerate(paths, 1):
            try:
                return load(path)
            except DamagedCheckpoint as error:
                instead = "using the one before it" if i < len(paths) else "there is no earlier one"
                warnings.warn(f"{error}; {instead}", stacklevel=2)
        return None
