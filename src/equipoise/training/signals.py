"""Stop by signal: the first ends the step and writes a checkpoint, the second exits immediately."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

NUMBERS = (signal.SIGTERM, signal.SIGINT)

_caught: signal.Signals | None = None


class Stopped(BaseException):
    """The work was stopped by a signal, and its state is saved.

    Not an `Exception`, so that code which continues after a failed job does not continue after this.
    """


def requested() -> bool:
    """Return whether a signal has asked to stop. A training loop checks this after each step."""
    return _caught is not None


def check() -> None:
    """Raise `Stopped` if a signal has asked to stop."""
    if requested():
        raise Stopped


@contextmanager
def stoppable(command: str) -> Iterator[None]:
    """Handle SIGTERM and SIGINT during the block, which checks `requested` and raises `Stopped` after saving.

    The process then prints one line and exits with the status that a shell gives to a process ended by a signal: 143
    for SIGTERM, 130 for Ctrl-C.

    Args:
        command: The command that continues the work, for the printed line.
    """
    if threading.current_thread() is not threading.main_thread():  # Python accepts handlers only in the main thread
        yield
        return
    global _caught
    # torchrun passes on a SIGTERM that its processes may have received already
    handler = _handler(patient="TORCHELASTIC_RUN_ID" in os.environ)
    before = {number: signal.signal(number, handler) for number in NUMBERS}
    try:
        yield
    except Stopped:
        _exit(command)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _caught = None


def stop_with_parent() -> None:
    """In a worker process, stop at SIGTERM, which the parent passes on, and ignore SIGINT.

    Ctrl-C reaches all processes of a terminal, and a SIGTERM may reach all processes of a group. The worker would count
    it and the parent's SIGTERM as two signals.
    """
    signal.signal(signal.SIGTERM, _handler(patient=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _handler(patient: bool) -> signal._HANDLER:
    """Return a handler of signals.

    Args:
        patient: Whether SIGTERM never exits immediately, because a parent process may repeat it.
    """
    owner = os.getpid()

    def notice(number: int, _: FrameType | None) -> None:
        global _caught
        if os.getpid() != owner:  # a forked process of a data loader
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if _caught is not None and not (patient and number == signal.SIGTERM):
            os._exit(128 + number)
        _caught = signal.Signals(number)

    return notice


def _exit(command: str) -> NoReturn:
    number = _caught or signal.SIGTERM
    if os.environ.get("RANK", "0") == "0":  # one process prints for all
        print(f"equipoise: stopped by {number.name}; continue with `{command}`", file=sys.stderr)
    sys.exit(128 + number)
