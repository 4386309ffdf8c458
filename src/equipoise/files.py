"""Atomic writes: after a crash or on a full disk, a file is the old one or the new one, never a part."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` once it is complete and flushed to the disk.

    One process may write to `path` at a time. A temporary file that a killed process left is overwritten.
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
