"""Tables of things that can be chosen by name: algorithms, models, datasets, objectives, corrections."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from equipoise.errors import UserError

T = TypeVar("T")


def suggestion(word: str, known: list[str]) -> str:
    """Return `; did you mean "rigl"?` if a known word is close, else a list of the known words."""
    near = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; choose from {', '.join(known)}"


class Catalogue(dict[str, T]):
    """Classes or functions by name, with a look-up error that suggests the right name.

    Args:
        kind: What an entry is, such as `topology`. The look-up error names it.
        entries: The table. The first line of an entry's docstring describes it.
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self.kind = kind

    def __missing__(self, name: str) -> T:
        raise UserError(f'no {self.kind} is called "{name}"{suggestion(str(name), sorted(self))}')

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)  # Python hashes the metadata of `Annotated[Base, catalogue]`

    def describe(self) -> dict[str, str]:
        """Return the first line of each entry's docstring, by name."""
        return {name: (entry.__doc__ or "").strip().partition("\n")[0] for name, entry in self.items()}
