"""The check that options of this package share."""

from __future__ import annotations

from equipoise.errors import UserError


def require_whole(name: str, value: object, least: int) -> None:
    """Raise unless `value` is a whole number (True and False are none) of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value!r} must be a whole number, {least} or more")
