"""Runs in processes of their own that are killed at chosen moments.

The processes are forked from a server that has torch and the data's reader loaded and has computed nothing yet: each
starts in a fraction of a second, and none inherits threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["equipoise.cli", "equipoise.train.loop", "sklearn.datasets", "torch._dynamo"])

Trap = tuple[str, int]
"""A moment and how many times it passes before the process is killed."""


def launch(arguments: list[str], log: Path, trap: Trap | None = None) -> int:
    """Run the command line in a new process and return its exit status, -9 where it was killed."""
    process = SERVER.Process(target=_run, args=(arguments, log, trap))
    process.start()
    process.join(120)
    assert process.exitcode is not None, f"still running: {arguments}"
    return process.exitcode


def _run(arguments: list[str], log: Path, trap: Trap | None) -> None:
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from equipoise.cli import main

    torch.set_num_threads(1)
    if trap is not None:
        _set(*trap)
    main(arguments)


def _set(moment: str, count: int) -> None:
    from equipoise.correction import Correction
    from equipoise.train import checkpoint
    from equipoise.train.average import Average
    from equipoise.train.checkpoint import Store
    from equipoise.train.folder import RunFolder
    from equipoise.train.loop import Trainer

    places: dict[str, tuple[Any, str, Callable[..., None] | None]] = {
        "after a step": (Trainer, "_eager_step", _die),
        "within a step": (Average, "update", None),
        "after a refresh": (Correction, "refresh", _die),
        "after a line": (RunFolder, "append", _die),
        "after half a checkpoint": (checkpoint, "save_file", _halve),
        "before a checkpoint has its name": (checkpoint, "flush", _die),
        "before old checkpoints are gone": (Store, "paths", None),
        "before the result": (RunFolder, "finish", None),
    }
    owner, name, after = places[moment]
    original = getattr(owner, name)
    calls = [0]

    @wraps(original)
    def trapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and after is None:
            _die()
        result = original(*arguments, **options)
        if calls[0] == count and after is not None:
            after(*arguments)
        return result

    setattr(owner, name, trapped)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _halve(_: Any, path: Path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)
    _die()
