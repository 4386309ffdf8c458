"""Run a command as a user would, and check that it ends well or in one line, and touches nothing but its folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import reprlib
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch._dynamo.package  # makes a folder when it is imported
import torch._inductor.compiler_bisector  # noqa: F401 - and so does this

from equipoise import cli
from equipoise.errors import LONGEST

LIMIT = 60  # seconds after which a command counts as one that hangs


class Guard:
    """Records writes outside one folder, new processes and network connections, by Python's audit events."""

    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
    NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile", "socket.connect")

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.seen: list[str] = []
        tempfile.gettempdir()  # writes a file when it is called first
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def within(self, folder: Path) -> Iterator[list[str]]:
        """Yield the list of events that are not allowed; writes inside `folder` are."""
        self.allowed, self.seen = folder.resolve(), []
        try:
            yield self.seen
        finally:
            self.allowed = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & self.WRITES
        if event in self.NEVER:
            self.seen.append(f"{event} {arguments!r}"[:200])
        elif writes or event in self.CHANGES:
            self._see(event, arguments[0])

    def _see(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or os.fspath(path) in ("/dev/null", b"/dev/null"):
            return
        where = os.path.realpath(os.fsdecode(path))
        if self.allowed is not None and not f"{where}{os.sep}".startswith(f"{self.allowed}{os.sep}"):
            self.seen.append(f"{event} {where}")


GUARD = Guard()


class Late(BaseException):
    """Not an `Exception`, because a reader may take any of those for a damaged file."""


def _late(*_: Any) -> None:
    raise Late


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Fail after `LIMIT` seconds. The timer of pytest-timeout, which is the same one, runs on afterwards."""
    handler = signal.signal(signal.SIGALRM, _late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT)
    started = time.monotonic()
    try:
        yield
    except Late:
        raise AssertionError(f"no end within {LIMIT} seconds") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 0.001))


def run_command(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command line in a folder and return its status and its error output.

    An assertion fails if the status is not 0 or 2, if it does not fit the error output, or if the guard has seen
    something.
    """
    out, err = io.StringIO(), io.StringIO()
    status: object = "no exit"
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(logging.root, "handlers", []),  # pytest's handlers are not there in a real process
        in_time(),
    ):
        try:
            with GUARD.within(folder) as outside:
                cli.main(words)
        except SystemExit as stopped:
            status = stopped.code
        finally:
            warnings.showwarning = SHOW
    wrong = [*outside, *_wrong(status, err.getvalue())]
    printed = " / ".join(line[:200] for line in err.getvalue().splitlines()[:5])
    assert not wrong, f"`equipoise {shown(words)}` {', '.join(wrong)}; it printed: {printed or 'nothing'}"
    assert isinstance(status, int)
    return status, err.getvalue()


SHOW = warnings.showwarning


def _wrong(status: object, printed: str) -> Iterator[str]:
    """Yield what is wrong. Right is status 0 with warnings at most, or status 2 with one readable line."""
    if status not in (0, 2):
        yield f"ended with {status}"
    complaints = [line for line in printed.splitlines() if "warning" not in line.lower()]
    if len(complaints) != (1 if status == 2 else 0):
        yield f"complained in {len(complaints)} lines with status {status}"
    if any(len(line) > LONGEST + 100 for line in complaints):
        yield f"printed a line of {max(map(len, complaints))} characters"
    if not all(line.isprintable() for line in complaints):
        yield "printed control characters"


@contextlib.contextmanager
def without_training() -> Iterator[None]:
    """Let commands do everything except train, draw, and ask git for the commit."""
    result = {"test": {"plain": {"accuracy": 0.5}}}
    replaced = {
        "equipoise.training.trainer.Trainer.run": lambda self: result,
        "equipoise.studies.demo.run_demo": lambda *_: None,
        "equipoise.display.figures._draw": lambda *_: None,
        "equipoise.studies.record.commit": lambda: None,
        "equipoise.analysis.descent.trajectories": dict,
        "equipoise.analysis.descent_figure.draw_descent": lambda *_: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        yield


# Messages about failures

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def shown(case: object) -> str:
    """Format an input; the middle of long words is left out."""
    return _short.repr(case)


def told(error: BaseException) -> str:
    """Format an error as one line; for anything but a failed assertion with the source line."""
    line = " ".join(str(error).split())[:1000]
    if isinstance(error, AssertionError) and line:
        return line
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {line} ({Path(last.filename).name}, line {last.lineno})"
