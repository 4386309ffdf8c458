"""Tables of things that can be chosen by name: algorithms, models, datasets, objectives, corrections.

A name is built in, belongs to an installed entry point, or is `package.module:attribute`. Looking up a name never
imports code that a file names: see `Catalogue.import_code`.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from equipoise.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def suggestion(word: str, known: list[str]) -> str:
    """Return `; did you mean "rigl"?` if a known word is close, else a list of the known words."""
    near = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; choose from {', '.join(known)}"


def names_code(name: str) -> bool:
    """Return whether a name is of the form `package.module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


class Catalogue(dict[str, T]):
    """Classes or functions by name, with a look-up error that suggests the right name.

    Args:
        kind: What an entry is, such as `topology`. The look-up error names it.
        entries: The built-in entries. The first line of an entry's docstring describes it.
        group: The plural of `kind`. Installed packages add entries by entry points of the group `equipoise.GROUP`.
            Without a group there are only the built-in entries.
        base: The class that entries of other packages are derived from; any callable without it.
    """

    def __init__(self, kind: str, entries: Mapping[str, T], group: str = "", base: type[Any] | None = None) -> None:
        super().__init__(entries)
        self.kind = kind
        self.group = group
        self.base = base

    def __missing__(self, name: str) -> T:
        plugins = self._plugins()
        if name in plugins:
            return self._add(name, plugins[name].load)
        if self.group and names_code(str(name)):
            raise UserError(
                f'the {self.kind} "{name}" is Python code, which is imported only if you type its name on the command '
                "line or add --allow-code"
            )
        raise UserError(f'no {self.kind} is called "{name}"{suggestion(str(name), sorted({*self, *plugins}))}')

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)  # Python hashes the metadata of `Annotated[Base, catalogue]`

    def import_code(self, name: str) -> T:
        """Import `package.module:attribute` and add it under this name.

        This runs the code of the module. Call it only with a name that the user has typed or approved.

        Raises:
            UserError: If the import fails, or the attribute is not an entry for this catalogue.
        """
        return self._add(name, lambda: _attribute(name))

    def describe(self) -> dict[str, str]:
        """Return the first line of each entry's docstring, by name."""
        lines = {}
        for name in (*self, *sorted(self._plugins().keys() - self.keys())):
            try:
                lines[name] = (self[name].__doc__ or "").strip().partition("\n")[0]
            except UserError as error:
                lines[name] = str(error)
        return lines

    def _plugins(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # takes longer to import than the rest of the module

        found = entry_points(group=f"equipoise.{self.group}") if self.group else ()
        return {point.name: point for point in found}

    def _add(self, name: str, load: Callable[[], Any]) -> T:
        try:
            entry = load()
        except Exception as error:  # importing a module can raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, ImportError | AttributeError) else f" ({where.filename}:{where.lineno})"
            raise UserError(
                f'the {self.kind} "{name}" cannot be imported: {type(error).__name__}: {error}{place}'
            ) from None
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            needed = f"{self.base.__module__}.{self.base.__qualname__}"
            raise UserError(f'the {self.kind} "{name}" is not a class derived from {needed}')
        if not callable(entry):
            raise UserError(f'the {self.kind} "{name}" is not a class or a function')
        self[name] = entry
        return entry


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
