"""Checks of option values that several packages share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from equipoise.config import shown
from equipoise.errors import UserError

MOST_THREADS = 1024  # OpenMP crashes the process if the system cannot start as many as it is asked for


def require_whole(least: int = 1, **values: object) -> None:
    """Raise unless every value is a whole number of at least `least`; `True` and `False` are not numbers.

    Args:
        least: The smallest value allowed.
        **values: The values to check, by the names used in the error message.

    Raises:
        UserError: For the first value that is not a whole number or is too small.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{name}={value!r} must be a whole number of at least {least}")


def require_threads(threads: int) -> None:
    """Raise unless OpenMP can be asked for this number of threads.

    Raises:
        UserError: If it is not a whole number from 1 to `MOST_THREADS`.
    """
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST_THREADS:
        raise UserError(f"threads={shown(threads)} must be a whole number from 1 to {MOST_THREADS}")


def kind_of(value: object) -> str:
    """Name the type of a wrong argument, or the class that was given itself."""
    return f"class, {value.__name__}" if isinstance(value, type) else type(value).__name__


def as_path(path: object) -> Path:
    """Return the path of a file.

    Raises:
        UserError: If it is neither text nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f'the path is a {kind_of(path)}; pass the name of a file, such as "net.safetensors"')
    return Path(path)


def require_classes(classes: Sequence[str], scores: int) -> None:
    """Raise unless every named class can have a score.

    Raises:
        UserError: If a network has more names of classes than scores.
    """
    if len(classes) > scores:
        raise UserError(f"there are {len(classes)} names of classes for {scores} scores")


def require_precision(precision: str) -> None:
    """Raise unless activations can have this precision.

    Raises:
        UserError: If it is neither `float32` nor `bf16`.
    """
    if precision not in ("float32", "bf16"):
        raise UserError(f'precision must be "float32" or "bf16", not {precision!r}')
