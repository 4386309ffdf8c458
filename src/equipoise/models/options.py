"""Checks of model options: a wrong value is told in one line."""

from __future__ import annotations

from equipoise.errors import UserError


def whole_numbers(least: int = 1, **options: int) -> None:
    """Refuse any option that is not a whole number of at least `least`."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least}")
