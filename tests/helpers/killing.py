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
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = [
    "equipoise.cli",
    "equipoise.training.trainer",
    "sklearn.datasets",
    "torch._dynamo",
    "typer._adapters",  # which typer imports when it reads its first option
]
SERVER.set_forkserver_preload(PRELOADED)
PATIENCE = 120  # seconds that a process may take

Trap = tuple[str, int]
"""A moment, and at which of its occurrences the process is killed, from 1."""


@dataclass(frozen=True)
class Point:
    """A point inside a function: in its `call`-th call, after `lines` lines of equipoise, or at its end."""

    place: str
    call: int
    lines: int = 0
    signal: int = signal.SIGKILL


Work = list[str] | Callable[[], None]
"""The words of a command line, or a function that can be pickled."""


def start(work: Work, log: Path, trap: Trap | Point | None = None, folder: Path | None = None) -> BaseProcess:
    """Start the command line or the function in a new process, in a folder."""
    process = SERVER.Process(target=_run, args=(work, log, trap, folder))
    process.start()
    return process


def launch(work: Work, log: Path, trap: Trap | Point | float | None = None) -> int:
    """Run the command line or the function in a new process and return its exit status, which is -9 if it was killed.

    Args:
        work: The words of the command line, or the function.
        log: The file for its output.
        trap: Where it is killed; a number means seconds after its start.
    """
    process = start(work, log, None if isinstance(trap, float) else trap)
    if isinstance(trap, float):
        process.join(trap)
        process.kill()
    process.join(PATIENCE)
    assert process.exitcode is not None, f"still running: {work}"
    return process.exitcode


def launch_group(
    words: list[str], count: int, log: Path, trap: Trap | Point | float | None = None, rank: int = 0
) -> int:
    """Run the command line in processes that train together. If one fails, the others are killed, as by torchrun.

    Args:
        words: The words of the command line.
        count: Number of processes.
        log: The file for their output.
        trap: Where one of them is killed.
        rank: Which of them.
    """
    port = _free_port()
    own = None if isinstance(trap, float) else trap
    processes = [
        SERVER.Process(target=_run, args=(words, log, own if each == rank else None, None, (each, count, port)))
        for each in range(count)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + (trap if isinstance(trap, float) else PATIENCE)
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        wait([process.sentinel for process in processes if process.is_alive()], deadline - time.monotonic())
        if any(process.exitcode for process in processes):
            break
    found = {process.exitcode for process in processes if process.exitcode}
    for process in processes:
        process.kill()
        process.join()
    assert found or isinstance(trap, float) or not any(p.exitcode for p in processes), f"still running: {words}"
    codes = found or {process.exitcode for process in processes}
    return -signal.SIGKILL if -signal.SIGKILL in codes else max(code or 0 for code in codes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(
    work: Work,
    log: Path,
    trap: Trap | Point | None,
    folder: Path | None = None,
    member: tuple[int, int, int] | None = None,
) -> None:
    """Work in this process. `member` is its rank in a group, their number, and their port."""
    if member is not None:
        rank, count, port = map(str, member)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if folder is not None:
        os.chdir(folder)
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
    if isinstance(work, list):
        main(work)
    else:
        work()


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
    from equipoise.integrations.attachment import Attachment
    from equipoise.studies import runner
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
        "study result": (runner, "write_result"),
        "framework checkpoint": (Attachment, "state_dict"),
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
