"""Runs in separate processes that are killed at chosen moments.

The processes are forked from a server that has imported torch and scikit-learn and has computed nothing. Each process
starts in a fraction of a second, and none inherits threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["equipoise.cli", "equipoise.training.trainer", "sklearn.datasets", "torch._dynamo"])

Trap = tuple[str, int]
"""A moment, and at which of its occurrences the process is killed, from 1."""


@dataclass(frozen=True)
class Point:
    """A point inside a function: in its `call`-th call, after `lines` lines of equipoise, or at its end."""

    place: str
    call: int
    lines: int = 0
    signal: int = signal.SIGKILL


def launch(arguments: list[str], log: Path, trap: Trap | Point | float | None = None) -> int:
    """Run the command line in a new process and return its exit status, which is -9 if it was killed.

    Args:
        arguments: The words of the command line.
        log: The file for its output.
        trap: Where it is killed; a number means seconds after its start.
    """
    process = SERVER.Process(target=_run, args=(arguments, log, None if isinstance(trap, float) else trap))
    process.start()
    if isinstance(trap, float):
        process.join(trap)
        process.kill()
    process.join(120)
    assert process.exitcode is not None, f"still running: {arguments}"
    return process.exitcode


def launch_two(arguments: list[str], log: Path, trap: Trap | Point | float | None = None, rank: int = 0) -> int:
    """Run the command line in two processes that train together. If one fails, the other is killed, as by torchrun.

    Args:
        arguments: The words of the command line.
        log: The file for their output.
        trap: Where one of them is killed.
        rank: Which of them.
    """
    port = _free_port()
    own = None if isinstance(trap, float) else trap
    processes = [
        SERVER.Process(target=_run, args=(arguments, log, own if each == rank else None, (each, port)))
        for each in (0, 1)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + (trap if isinstance(trap, float) else 120)
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        wait([process.sentinel for process in processes if process.is_alive()], deadline - time.monotonic())
        if any(process.exitcode for process in processes):
            break
    found = {process.exitcode for process in processes if process.exitcode}
    for process in processes:
        process.kill()
        process.join()
    assert found or isinstance(trap, float) or not any(p.exitcode for p in processes), f"still running: {arguments}"
    codes = found or {process.exitcode for process in processes}
    return -signal.SIGKILL if -signal.SIGKILL in codes else max(code or 0 for code in codes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(arguments: list[str], log: Path, trap: Trap | Point | None, pair: tuple[int, int] | None = None) -> None:
    """Run the command line in this process. `pair` is its rank in a pair, and their port."""
    if pair is not None:
        rank, port = map(str, pair)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from equipoise.cli import main

    torch.set_num_threads(1)
    if isinstance(trap, Point):
        _set_within(trap)
    elif trap is not None:
        _set(*trap)
    main(arguments)


def _set(moment: str, count: int) -> None:
    from equipoise.correction import Correction
    from equipoise.topology.ema import EMA
    from equipoise.training import checkpoint
    from equipoise.training.checkpoint import Store
    from equipoise.training.run_folder import RunFolder
    from equipoise.training.step import Step

    moments: dict[str, tuple[Any, str, Callable[..., None] | None]] = {
        "after a step": (Step, "__call__", _die),
        "within a step": (EMA, "blend", None),
        "after a refresh": (Correction, "refresh", _die),
        "after a line": (RunFolder, "append", _die),
        "after half a checkpoint": (checkpoint, "save_file", _halve),
        "before a checkpoint has its name": (checkpoint, "save_file", _die),
        "before a file has its second name": (os, "link", None),  # a recipe, then each best checkpoint
        "before old checkpoints are gone": (Store, "paths", None),
        "before the result": (RunFolder, "finish", None),
    }
    owner, name, after = moments[moment]
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


def _set_within(point: Point) -> None:
    from equipoise.correction import Correction
    from equipoise.topology import Topology
    from equipoise.training.checkpoint import Store
    from equipoise.training.run_folder import RunFolder
    from equipoise.training.step import Step
    from equipoise.training.trainer import Trainer

    owner, name = {
        "step": (Step, "__call__"),
        "refresh": (Correction, "refresh"),
        "update": (Topology, "_update"),
        "checkpoint": (Store, "save"),
        "evaluation": (Trainer, "evaluate"),
        "line": (RunFolder, "append"),
        "result": (RunFolder, "finish"),
    }[point.place]
    original = getattr(owner, name)
    calls, lines = [0], [point.lines]

    def fire() -> None:
        sys.settrace(None)
        os.kill(os.getpid(), point.signal)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and "equipoise" in frame.f_code.co_filename:
            if lines[0] == 0:
                fire()
            lines[0] -= 1
        return trace

    @wraps(original)
    def trapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] != point.call:
            return original(*arguments, **options)
        sys.settrace(trace)
        result = original(*arguments, **options)
        sys.settrace(None)
        if lines[0] >= 0:
            fire()
        return result

    setattr(owner, name, trapped)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _halve(_: Any, path: Path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)
    _die()
