"""Things that can be chosen by name: algorithms, models, datasets, objectives, corrections."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from equipoise.errors import UserError

T = TypeVar("T")


def suggestion(word: str, known: list[str]) -> str:
    """`, did you mean "rigl"?` for a near miss, else the list of what there is."""
    near = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; there is {', '.join(known)}"


class Catalogue(Mapping[str, T]):
    """A read-only table of named things whose look-up error tells what would have been right."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UserError(f'no {self.kind} is called "{name}"{suggestion(str(name), sorted(self._entries))}')
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def describe(self) -> dict[str, str]:
        """The first line of each entry's docstring, by name."""
        return {name: (entry.__doc__ or "").strip().partition("\n")[0] for name, entry in self.items()}
