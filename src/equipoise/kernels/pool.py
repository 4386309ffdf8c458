"""Objects that one call uses at a time, so that several threads can run one model."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """Lends objects to calls. A call that finds none idle makes another.

    There is no lock: the operations of a deque are atomic. A forked child can therefore not wait for a lock that was
    held by a thread of its parent.

    Args:
        make: Makes an object.
        first: Objects that exist already.
        kept: Largest number of idle objects; by default one for each core, because more cannot run at once.
    """

    def __init__(self, make: Callable[[], T], first: Iterable[T] = (), kept: int | None = None) -> None:
        self._make = make
        self._idle: deque[T] = deque(first, maxlen=kept or os.cpu_count() or 1)

    @contextmanager
    def lend(self) -> Iterator[T]:
        """Lend an object for the duration of a block."""
        try:
            item = self._idle.pop()  # the one used last: its memory is still in cache
        except IndexError:
            item = self._make()
        try:
            yield item
        finally:
            self._idle.append(item)
