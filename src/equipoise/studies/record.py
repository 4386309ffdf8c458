"""The result of one arm and seed, as it is written to its file."""

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


def record(study: str, arm: str, trainer: Trainer, result: Mapping[str, Any], jobs_on_device: int) -> dict[str, Any]:
    """Return everything that a comparison needs, without weights and without folders of the machine.

    Args:
        study: Name of the study.
        arm: Name of the arm.
        trainer: The trainer of the run, at its end.
        result: What `trainer.run` returned.
        jobs_on_device: Number of jobs that shared the device, including this one.
    """
    name, options = split(trainer.raw.get("data", "digits"), "data")
    data = {"name": name, **{key: value for key, value in options.items() if key != "root"}}
    layers = {layer.name: {"size": layer.size, "active": layer.active} for layer in trainer.parts.topology.layers}
    return {
        "version": VERSION,
        "study": study,
        "arm": arm,
        "seed": trainer.recipe.seed,
        "finished": True,
        "recipe": {**trainer.raw, "data": data},
        "environment": environment(trainer.parts.device, jobs_on_device),
        "epochs": trainer.history,
        "result": dict(result),
        "layers": layers,
    }


def environment(device: torch.device, jobs_on_device: int) -> dict[str, Any]:
    """Return what a number may depend on besides its recipe."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "equipoise": __version__,
        "jobs_on_device": jobs_on_device,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def commit(file: Path = Path(__file__)) -> str | None:
    """Return the commit of this code: the variable GIT_COMMIT, which many CI systems set, or that of its checkout.

    "+changes" is appended if the package differs from the commit. `None` if the package is installed outside a
    checkout of its own.
    """
    if named := os.environ.get("GIT_COMMIT"):
        return named
    try:
        if not _git(file, "ls-files", file.name):
            return None
        changed = _git(file, "status", "--porcelain", "--untracked-files=no", "--", "..")  # the whole package
        return _git(file, "rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(file: Path, *words: str) -> str:
    command = ["git", "-C", str(file.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
