"""The folder of a run: its recipe, one JSON line per epoch, its checkpoints, its result."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.training.checkpoint import Store
from equipoise.training.recipe import dump_recipe, read_recipe

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """recipe.yaml, metrics.jsonl, checkpoints/, result.json."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.store = Store(path / "checkpoints", keep)
        self._claim: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, raw: Mapping[str, Any], keep: int = 2) -> RunFolder:
        """A new run; an existing one is never written over."""
        if in_use(path):
            raise UserError(f"{path} exists; `equipoise resume {path}` goes on with it, --out names another folder")
        folder = cls(path, keep)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._write(path / "recipe.yaml", dump_recipe(raw))
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}") from None
        return folder

    @classmethod
    def open(cls, path: Path, keep: int = 2) -> RunFolder:
        if not os.path.isfile(path / "recipe.yaml"):  # False, too, for a path that cannot be
            raise UserError(f"{path} is not a run: it has no recipe.yaml")
        return cls(path, keep)

    def claim(self) -> None:
        """Hold the run until `release` or the end of this process: two that train into one folder would spoil it."""
        if self._claim is not None or fcntl is None:
            return
        file = open(self.path / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise UserError(f"{self.path} is being trained by another process") from None
        except OSError:
            pass  # a file system without locks
        self._claim = file

    def release(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def recipe(self) -> dict[str, Any]:
        return read_recipe(str(self.path / "recipe.yaml"))

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def append(self, line: Mapping[str, Any]) -> None:
        with open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(strict_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The epochs so far."""
        return read_epochs(self.metrics_file)

    def forget_after(self, epoch: int) -> None:
        """Leave out the lines of epochs that a resumed run will do again."""
        kept = [line for line in self.metrics() if line["epoch"] <= epoch]
        self._write(self.metrics_file, "".join(strict_json(line) + "\n" for line in kept))

    def finish(self, result: Mapping[str, Any]) -> None:
        self._write(self.path / "result.json", strict_json(result, indent=2) + "\n")

    @property
    def has_result(self) -> bool:
        return (self.path / "result.json").is_file()

    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{path} is damaged; remove it, and `equipoise resume {self.path}` writes it again")
        return found

    def _write(self, path: Path, text: str) -> None:
        """Whole or not at all, like a checkpoint."""
        write_whole(path, text.encode())


def read_epochs(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that has one for each epoch, none where there is no file.

    What is no such line, as the last one that a kill has cut short, is left out.
    """
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("epoch"), int):
            lines.append(line)
    return lines


def in_use(path: Path) -> bool:
    """Whether a new run may not be put there; what a run that was killed at its very start has left is nothing."""
    return path.exists() and (not path.is_dir() or any(each.name != ".recipe.yaml.tmp" for each in path.iterdir()))


def strict_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(strict(value), indent=indent, allow_nan=False)


def strict(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not have: they become null."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
