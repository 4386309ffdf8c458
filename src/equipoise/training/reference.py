"""The options of everything that a recipe can name, read from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from equipoise.catalogue import Catalogue
from equipoise.config import EXPECTED, hints_of, parameters_of
from equipoise.correction import COEFFICIENTS
from equipoise.data import Augment
from equipoise.training.build_recipe import without_suffix
from equipoise.training.published import PublishedOptions
from equipoise.training.recipe import (
    CATALOGUES,
    DEFAULT_NAMES,
    KEYS,
    MODEL_OPTIONS_OF_DATA,
    CheckpointOptions,
    DataOptions,
    Recipe,
)
from equipoise.training.rollback import RollbackOptions


@dataclass(frozen=True)
class Option:
    """One option of an entry.

    Attributes:
        name: Its name.
        type: The values that it takes.
        default: The default as YAML, `required`, or `from the data`.
        text: What it means; empty if the docstring does not say.
    """

    name: str
    type: str
    default: str
    text: str

    @property
    def line(self) -> str:
        """The first sentence of the text."""
        return re.split(r"(?<=\.) (?=[A-Z`])", self.text)[0]


def options_of(factory: Callable[..., Any]) -> list[Option]:
    """Return the options of a dataclass, class or function that a recipe names."""
    hints, texts = hints_of(factory), _texts(factory)
    names = [name for name in parameters_of(factory) if name != "root" or is_dataclass(factory)]
    return [
        Option(name, type_words(hints.get(name, Any)), _default(factory, name), texts.get(name, "")) for name in names
    ]


def entry_options(group: str, name: str) -> list[Option]:
    """Return the options of a name in the catalogue of a group, such as `models`; none if there is no catalogue.

    The name of a topology may have a suffix that changes its defaults, such as `-itop`.
    """
    catalogue = next((each for each in CATALOGUES.values() if each.group == group), None)
    if catalogue is None:
        return []
    base, suffix = without_suffix(name) if catalogue is CATALOGUES["topology"] else (name, "")
    options = options_of(catalogue[base])
    if catalogue is CATALOGUES["data"]:
        return [*(option for option in options_of(DataOptions) if option.name != "name"), *options]
    if not suffix:
        return options
    changed = getattr(catalogue[base], suffix)()
    return [replace(option, default=as_yaml(getattr(changed, option.name))) for option in options]


def _default(factory: Callable[..., Any], name: str) -> str:
    if is_dataclass(factory):  # the signature has only a placeholder for a default factory
        (field,) = (each for each in fields(factory) if each.name == name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        return "required" if default is MISSING else as_yaml(default)
    if name in MODEL_OPTIONS_OF_DATA:
        return "from the data"
    default = inspect.signature(factory).parameters[name].default
    return "required" if default is inspect.Parameter.empty else as_yaml(default)


def _texts(factory: Callable[..., Any]) -> dict[str, str]:
    """Return the texts of the section `Args:` in the docstrings of a class and its bases, or of a function.

    A function that makes an object of a class has the arguments of the class too.
    """
    made = hints_of(factory).get("return") if not isinstance(factory, type) else None
    sources = [*reversed(factory.__mro__)] if isinstance(factory, type) else [made, factory]
    texts: dict[str, str] = {}
    for source in sources:
        texts |= _arguments(inspect.cleandoc(source.__doc__ or "")) if source is not None else {}
    return texts


def _arguments(docstring: str) -> dict[str, str]:
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE)
    texts: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        if begin := re.match(r"    (\w+): (.*)", line):
            name, texts[begin[1]] = begin[1], begin[2]
        elif name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts


def type_words(hint: Any) -> str:
    """Describe a type hint in the words of a recipe."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return "any"
    if hint is NoneType:
        return "null"
    if origin is Annotated:
        return " | ".join(hint.__metadata__[0])
    if origin in (Union, types.UnionType):
        written = [each for each in inner if get_origin(each) not in (None, type) or each in (*EXPECTED, NoneType)]
        return " | ".join(map(type_words, [*written, *filter(is_dataclass, inner)]))
    if origin is Literal:
        return " | ".join(map(as_yaml, inner))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"list of {type_words(inner[0])}"
    if is_dataclass(hint):
        return "mapping"
    return getattr(hint, "__name__", str(hint))


def as_yaml(value: Any) -> str:
    """Format a value in one line, as it can be written in a recipe."""
    text = yaml.safe_dump([plain(value)], default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text[1:-2]


def plain(value: Any) -> Any:
    """Return a value as lists, mappings and scalars; a dataclass as its fields, with its name if it has one."""
    if is_dataclass(value) and not isinstance(value, type):
        kind: type[Any] = type(value)
        name = next((name for name, entry in COEFFICIENTS.items() if entry is kind), None)
        named = {} if name is None else {"name": name}
        return named | {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


# The page


def reference() -> str:
    """Return a page in Markdown with all keys of a recipe, and all options of every part."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# The keys of a recipe"
    yield ""
    yield "Written by `equipoise recipe --keys`. `equipoise recipe NAME` prints a full recipe, `equipoise list NAME`"
    yield "the options of a name. A part with options is written as `topology: {name: rigl, sparsity: 0.9}`."
    yield ""
    yield from _table(["key", "values", "default", "meaning"], map(_recipe_row, KEYS))
    for key, options in (
        ("data.augment", Augment),
        ("checkpoint", CheckpointOptions),
        ("rollback", RollbackOptions),
        ("as_published", PublishedOptions),
    ):
        yield from ("", f"## {key}", "")
        rows = ([f"`{o.name}`", o.type, o.default, o.text] for o in options_of(options) if o.name != "name")
        yield from _table(["option", "values", "default", "meaning"], rows)
    for part, catalogue in {**CATALOGUES, "correction.coefficient": COEFFICIENTS}.items():
        yield from ("", f"## {part}", "")
        yield from _part(catalogue, [DataOptions] if part == "data" else [])


def _recipe_row(key: str) -> list[str]:
    text = _texts(Recipe)[key]
    if key in DEFAULT_NAMES:
        names = " | ".join(built_in(CATALOGUES[key]))
        return [f"`{key}`", names, DEFAULT_NAMES[key], text]
    (option,) = (each for each in options_of(Recipe) if each.name == key)
    return [f"`{key}`", option.type, option.default, text]


def _part(catalogue: Catalogue[Any], common: list[Any]) -> Iterator[str]:
    """Yield the entries of a catalogue, and one row per option of them and of what is common to all."""
    entries = built_in(catalogue)
    lines = catalogue.describe()
    yield from _table(["name", ""], ([f"`{name}`", lines[name]] for name in entries))
    rows = {o.name: [("", o)] * len(entries) for each in common for o in options_of(each) if o.name != "name"}
    for name, entry in entries.items():
        for option in options_of(entry):
            rows.setdefault(option.name, []).append((name, option))
    if rows:
        yield ""
        columns = ["option", "values", "default", "of", "meaning"]
        yield from _table(columns, (_option_row(given, len(entries)) for given in rows.values()))


def _option_row(given: list[tuple[str, Option]], entries: int) -> list[str]:
    """Merge the same option of several entries into one row."""
    usual, values = (
        Counter(each).most_common(1)[0][0] for each in ([o.default for _, o in given], [o.type for _, o in given])
    )
    others = [f"{name}: {option.default}" for name, option in given if option.default != usual]
    default = f"{usual} ({', '.join(others)})" if others else usual
    of = "all" if len(given) == entries else ", ".join(name for name, _ in given)
    first = given[0][1]
    return [f"`{first.name}`", values, default, of, first.text]


def built_in(catalogue: Catalogue[Any]) -> dict[str, Any]:
    """Return the entries that are part of this package."""
    return {name: entry for name, entry in catalogue.items() if entry.__module__.startswith("equipoise.")}


def _table(columns: list[str], rows: Any) -> Iterator[str]:
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
