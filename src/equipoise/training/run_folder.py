"""The folder of a run: recipe, metrics, checkpoints and result."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from equipoise.errors import UserError
from equipoise.files import open_to_append, remove_leftovers, write_new, write_whole
from equipoise.training.checkpoint import Store
from equipoise.training.recipe_files import dump_recipe, read_recipe

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


WRITTEN = ("recipe.yaml", "metrics.jsonl", "result.json", "checkpoints", ".lock")


class FolderTaken(UserError):
    """The folder of a new run exists."""


class RunBusy(UserError):
    """Another process trains the run."""


class RunFolder:
    """The files recipe.yaml, metrics.jsonl (one line per epoch), checkpoints/ and result.json.

    Args:
        path: The folder.
        keep: Number of checkpoints that are kept.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.store = Store(path / "checkpoints", keep)
        self._claim: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, raw: Mapping[str, Any], keep: int = 2) -> RunFolder:
        """Create the folder of a new run. Of several processes that create the same one, the first gets it.

        Raises:
            FolderTaken: If the folder exists and is not empty.
            UserError: If it cannot be written.
        """
        taken = FolderTaken(f"{path} exists; `equipoise resume {path}` continues it, --out names another folder")
        if in_use(path):
            raise taken
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_new(path / "recipe.yaml", dump_recipe(raw).encode())
        except OSError as error:
            if os.path.lexists(path / "recipe.yaml"):
                raise taken from None
            raise UserError(f"cannot write to {path}: {error.strerror}") from None
        return cls(path, keep)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run."""
        if not os.path.isfile(path / "recipe.yaml"):  # unlike Path.is_file, False for a name that is too long
            raise UserError(f"{path} is not a run: it has no recipe.yaml")
        return cls(path)

    def claim(self) -> None:
        """Lock the run until `release` or the end of this process, so that no other process trains it as well.

        Raises:
            RunBusy: If another process trains the run.
            UserError: If a file of the run is a symbolic link.
        """
        if self._claim is not None:
            return
        for path in (self.path / name for name in WRITTEN):
            if path.is_symlink():
                raise UserError(f"{path} is a symbolic link; a run writes to files of its own folder only")
        if fcntl is not None:
            file = open_to_append(self.path / ".lock")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.close()
                raise RunBusy(f"{self.path} is being trained by another process") from None
            except OSError:
                pass  # a file system without locks
            self._claim = file
        for name in WRITTEN:
            remove_leftovers(self.path / name)

    def release(self) -> None:
        """Unlock the run."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def recipe(self) -> dict[str, Any]:
        """Read recipe.yaml."""
        return read_recipe(str(self.path / "recipe.yaml"))

    def extend(self, raw: Mapping[str, Any]) -> None:
        """Replace recipe.yaml, and remove the result of the training so far."""
        write_whole(self.path / "recipe.yaml", dump_recipe(raw).encode())
        (self.path / "result.json").unlink(missing_ok=True)

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def append(self, line: Mapping[str, Any]) -> None:
        """Append the metrics of an epoch."""
        with open_to_append(self.metrics_file) as file:
            file.write(strict_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """Read the metrics of all epochs so far."""
        return read_epochs(self.metrics_file)

    def forget_after(self, epoch: int) -> None:
        """Remove the metrics of epochs that a resumed run repeats."""
        kept = [line for line in self.metrics() if line["epoch"] <= epoch]
        write_whole(self.metrics_file, "".join(strict_json(line) + "\n" for line in kept).encode())

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        write_whole(self.path / "result.json", f"{strict_json(result, indent=2)}\n".encode())

    @property
    def has_result(self) -> bool:
        return (self.path / "result.json").is_file()

    def result(self) -> dict[str, Any] | None:
        """Read result.json; `None` if the run is not finished."""
        path = self.path / "result.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{path} is damaged; remove it and run `equipoise resume {self.path}` to write it again")
        return found


def read_epochs(file: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON line per epoch; an empty list if there is no file.

    Other lines are skipped, such as a last line that was cut short when the process was killed.
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


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder and its subfolders, sorted by name."""
    found = []
    for path, folders, files in os.walk(folder):
        if "recipe.yaml" in files:
            found.append(Path(path))
            folders.clear()
    return sorted(found)


def in_use(path: Path) -> bool:
    """Return whether a path cannot become the folder of a new run.

    A folder with only temporary files of runs that were killed at their start can.
    """
    return path.exists() and (
        not path.is_dir() or not all(fnmatch(each.name, ".recipe.yaml.*tmp") for each in path.iterdir())
    )


def strict_json(value: Any, indent: int | None = None) -> str:
    """Format a value as JSON, see `strict`."""
    return json.dumps(strict(value), indent=indent, allow_nan=False)


def strict(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by `None`."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
