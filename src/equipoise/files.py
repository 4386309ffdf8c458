"""Atomic writes: after a crash or on a full disk, a file is the old one or the new one, never a part."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LEFTOVER_SECONDS = 3600.0  # a temporary file that has not changed for so long is of a killed process


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a new temporary file that replaces `path` once it is complete and flushed to the disk."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _temporary_file(path) as temporary:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    flush(path.parent)


@contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    """Yield an empty file with an unpredictable name next to `path`, and remove it."""
    remove_leftovers(path, LEFTOVER_SECONDS)
    temporary = temporary_name(path)
    # O_EXCL fails at a symbolic link. The mode is the default of `open`, less the umask.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Return an unpredictable name for a temporary file that becomes `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def remove_leftovers(path: Path, seconds: float = 0.0) -> None:
    """Remove the temporary files for `path` that killed processes left.

    Args:
        path: The file that they were written for.
        seconds: Files that changed in the last `seconds` stay: another process may be writing them.
    """
    if not path.parent.is_dir():
        return
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}.") and name.endswith(".tmp"):
            with suppress(FileNotFoundError):
                if not seconds or time.time() - os.lstat(path.parent / name).st_mtime > seconds:
                    os.unlink(path.parent / name)


def write_new(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        FileExistsError: If the file exists, also if another process has created it in the meantime.
    """
    with _temporary_file(path) as temporary:
        temporary.write_bytes(content)
        flush(temporary)
        try:
            os.link(temporary, path)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError:  # a file system without links
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.replace(temporary, path)
    flush(path.parent)


def open_to_append(path: Path) -> IO[str]:
    """Open a text file to append to it; a symbolic link is an `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def disk_is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk, the quota or the file size limit was reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
