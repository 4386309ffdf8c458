"""Writing files so that a crash or a full disk leaves the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file to write to, which takes the name of `path` when it is complete and on the disk.

    For one writer at a time; what one that was killed has left behind, the next one writes over.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def disk_is_full(error: BaseException) -> bool:
    """Whether there was no room to write, or a file was not allowed to grow."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flush(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
