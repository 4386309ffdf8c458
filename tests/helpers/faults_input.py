"""Input that nobody meant: each ends in success or one line and status 2, and touches nothing outside its folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import reprlib
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch._dynamo  # noqa: F401 - makes the folder of its cache before anybody watches

from equipoise import cli
from equipoise.errors import LONGEST

LIMIT = 60  # seconds after which an input counts as one that hangs
TOKENS = [
    *(b"", b"\0", b"\xff" * 8, b"NaN", b"Infinity", b"null", b"-1", b"1e999", b"9" * 30, b"../../x", b"/etc/passwd"),
    *(b"{", b"[", b'"', b"&a *a", b"!!python/name:os.system", b"\x80\x04cos\nsystem\n", b"\xf0\x9f", b"\n", b": "),
]


def mutated(content: bytes, random: Random) -> bytes:
    """The same with one to three changes: bits and bytes, pieces cut, doubled, moved or put in, the end cut off."""
    for _ in range(random.choice((1, 1, 2, 3))):
        place, length = random.randint(0, len(content)), random.choice((1, 1, 2, 4, 16, 200))
        end = min(len(content), place + length)
        head, piece, tail = content[:place], content[place:end], content[end:]
        kind = random.randrange(7)
        if kind == 0 and piece:
            piece = bytes([piece[0] ^ (1 << random.randrange(8))]) + piece[1:]
        elif kind == 1:
            piece = random.randbytes(len(piece))
        elif kind == 2:
            piece = b""
        elif kind == 3:
            piece *= random.choice((2, 3, 50))
        elif kind == 4:
            piece = random.choice(TOKENS)
        elif kind == 5:
            start = random.randint(0, len(content))
            piece = content[start : start + length]
        elif random.random() < 0.5:
            tail = b""
        content = head + piece + tail
    return content


# What a process may do while it reads


class Guard:
    """Notes what Python does beyond reading, anywhere but in one folder: files, processes, connections."""

    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
    NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile", "socket.connect")

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def within(self, folder: Path) -> Iterator[list[str]]:
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
    """Not an `Exception`: a reader that takes any of those for a damaged file must not take this one for it."""


def _late(*_: Any) -> None:
    raise Late


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT)
    try:
        yield
    except Late:
        raise AssertionError(f"no end within {LIMIT} seconds") from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_command(words: list[str], folder: Path) -> tuple[int, str]:
    """The status and the complaints of a command line; an assertion fails where they are not as they should be."""
    out, err = io.StringIO(), io.StringIO()
    status: object = "no exit"
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(logging.root, "handlers", []),  # as in a process of its own
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


def _wrong(status: object, printed: str) -> Iterator[str]:
    """What is not as it should be: status 0 with warnings at most, or 2 with one line that a person can read."""
    if status not in (0, 2):
        yield f"ended with {status}"
    complaints = [line for line in printed.splitlines() if "warning" not in line.lower()]
    if len(complaints) != (1 if status == 2 else 0):
        yield f"complained in {len(complaints)} lines with status {status}"
    if any(len(line) > LONGEST + 100 for line in complaints):
        yield f"printed a line of {max(map(len, complaints))} characters"
    if not all(line.isprintable() for line in complaints):
        yield "printed control characters"


SHOW = warnings.showwarning


def without_training() -> contextlib.ExitStack:
    """Commands do everything but train, draw, and ask git for the commit."""
    result = {"test": {"plain": {"accuracy": 0.5}}}
    stack = contextlib.ExitStack()
    for name, value in {
        "equipoise.training.trainer.Trainer.run": lambda self: result,
        "equipoise.studies.demo.run_demo": lambda *_: None,
        "equipoise.display.figures._draw": lambda *_: None,
        "equipoise.studies.record.commit": lambda: None,
        "equipoise.cli.measure.trajectories": dict,
        "equipoise.cli.measure.draw_descent": lambda *_: None,
    }.items():
        stack.enter_context(mock.patch(name, value))
    return stack


# What is told of a failure

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def shown(case: object) -> str:
    """An input, with the middle of long words left out."""
    return _short.repr(case)


def told(error: BaseException) -> str:
    """What was raised, in one line; of what is a bug for certain also where."""
    line = " ".join(str(error).split())[:1000]
    if isinstance(error, AssertionError) and line:
        return line
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {line} ({Path(last.filename).name}, line {last.lineno})"


# Files that are changed


@dataclass(frozen=True)
class Kind:
    """Files of one kind, below `work`: how sound ones are made, which are changed, and what then reads them.

    ways: how many commands there are that read them, of which one is chosen at random.
    """

    name: str
    prepare: Callable[[Path], None]
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, Random], None]
    ways: int = 1


@dataclass
class Tally:
    """What was tried and what was found."""

    inputs: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def try_files(kind: Kind, folder: Path, count: int, seed: int, tally: Tally) -> None:
    """So many changed files; what a read leaves behind is taken away after each."""
    work, canary = folder / "work", folder / "canary"
    work.mkdir(parents=True)
    canary.write_text("untouched")
    kind.prepare(work)
    sound = snapshot(work)
    targets = kind.files(work)
    with without_training():
        for number in range(count):
            random = Random(f"{kind.name} {seed} {number}")
            path = random.choice(targets)
            path.unlink()  # it may be a link to another
            path.write_bytes(mutated(sound[path], random))
            try:
                kind.read(work, random)
            except Exception as error:
                name = f"{kind.name} {number} of seed {seed}, {path.relative_to(work)}"
                tally.failures.append(f"{name}: {told(error)}")
            tally.inputs[kind.name] += 1
            _restore(work, sound)
    if sorted(path.name for path in folder.iterdir()) != ["canary", "work"] or canary.read_text() != "untouched":
        tally.failures.append(f"{kind.name}: something beside its folder was touched")
    shutil.rmtree(folder)


def _restore(work: Path, sound: dict[Path, bytes]) -> None:
    for path in work.rglob("*"):
        if path.is_file() and path not in sound:
            path.unlink()
    for path, content in sound.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
