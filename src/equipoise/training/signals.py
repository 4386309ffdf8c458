"""Stopping on request: the first signal lets the step end and a checkpoint be written, the second ends at once."""

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
    """Work was left off because a signal asked for it; what there is of it is on the disk.

    Not an `Exception`: whoever goes on after the failure of one job must not go on after this.
    """


def requested() -> bool:
    """Whether a signal has asked to stop; a training loop looks after each step."""
    return _caught is not None


def check() -> None:
    """Leave off here if a signal has asked for it."""
    if requested():
        raise Stopped


@contextmanager
def stoppable(how_to_go_on: str) -> Iterator[None]:
    """Around work that looks at `requested` and raises `Stopped` once all is saved.

    It then ends the process with one line, which names the command that goes on with the work, and the status that a
    shell gives to a process that a signal has ended: 143 for SIGTERM, 130 for Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python takes no handlers
        yield
        return
    before = {number: signal.signal(number, _handler()) for number in NUMBERS}
    try:
        yield
    except Stopped:
        _end(how_to_go_on)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _forget()


def stop_with_parent() -> None:
    """In a process that works for another: SIGTERM, which that one passes on, asks it to stop.

    Ctrl-C reaches all processes of a terminal, so that it would arrive a second time: the parent's alone counts.
    """
    signal.signal(signal.SIGTERM, _handler())
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _handler() -> signal._HANDLER:
    owner = os.getpid()

    def notice(number: int, _: FrameType | None) -> None:
        global _caught
        if os.getpid() != owner:  # a process that reads images, forked from the one that trains
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if _caught is not None:
            os._exit(128 + number)
        _caught = signal.Signals(number)

    return notice


def _end(how_to_go_on: str) -> NoReturn:
    number = _caught or signal.SIGTERM
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print(f"equipoise: stopped by {number.name}; `{how_to_go_on}` goes on from here", file=sys.stderr)
    sys.exit(128 + number)


def _forget() -> None:
    global _caught
    _caught = None
