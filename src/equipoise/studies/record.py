"""What is kept of a finished arm x seed: one small JSON file."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from equipoise import __version__
from equipoise.config import split
from equipoise.studies.results import VERSION
from equipoise.training.trainer import Trainer


def record(study: str, arm: str, trainer: Trainer, result: Mapping[str, Any], together: int = 1) -> dict[str, Any]:
    """All that a comparison needs, without weights and without anything of the machine's folders."""
    layers = {layer.name: {"size": layer.size, "active": layer.active} for layer in trainer.parts.topology.layers}
    return {
        "version": VERSION,
        "study": study,
        "arm": arm,
        "seed": trainer.recipe.seed,
        "finished": True,
        "recipe": _without_root(trainer.raw),
        "environment": environment(trainer.parts.device, together),
        "epochs": trainer.history,
        "result": dict(result),
        "layers": layers,
    }


def _without_root(raw: Mapping[str, Any]) -> dict[str, Any]:
    name, options = split(raw.get("data", "digits"), "data")
    return {**raw, "data": {"name": name, **{key: value for key, value in options.items() if key != "root"}}}


def environment(device: torch.device, together: int) -> dict[str, Any]:
    """What a number may depend on beside its recipe. together: the runs that share the device, this one included."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "equipoise": __version__,
        "jobs_on_device": together,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def commit(file: Path = Path(__file__)) -> str | None:
    """The commit of this code: GIT_COMMIT, as many a CI sets it, or that of the checkout it lies in.

    With "+changes" where the code is not as committed. None where it is installed, be it within another checkout.
    """
    if named := os.environ.get("GIT_COMMIT"):
        return named
    try:
        if not _git(file, "ls-files", file.name):
            return None
        changed = _git(file, "status", "--porcelain", "--untracked-files=no", "--", "..")  # of the package
        return _git(file, "rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(file: Path, *words: str) -> str:
    command = ["git", "-C", str(file.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
