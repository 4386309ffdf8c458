"""From plain text (YAML, command line) to dataclasses: strict keys, checked types, errors for people."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from equipoise.catalogue import suggestion
from equipoise.errors import UserError

T = TypeVar("T")
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}  # what torch can hold


def build(factory: Callable[..., T], options: Mapping[str, Any], where: str) -> T:
    """Call a dataclass or function with options that are checked against its fields and their types."""
    return call(factory, checked(factory, options, where), where)


def checked(factory: Callable[..., Any], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options as the types of a dataclass or function want them; an unknown or missing one is an error."""
    known = parameters_of(factory)
    check_names(options, known, where)
    hints = typing.get_type_hints(factory)
    values = {key: convert(value, hints.get(key, Any), f"{where}.{key}") for key, value in options.items()}
    missing = [name for name, required in known.items() if required and name not in values]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing")
    return values


def check_names(options: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse a name that is not known, and say which is."""
    for name in options:
        if not isinstance(name, str):
            raise UserError(f"{where}: options have names, not {shown(name)}")
        if name not in known:
            raise UserError(f'{where}: no option is called "{name}"{suggestion(name, sorted(known))}')


def call(factory: Callable[..., T], values: Mapping[str, Any], where: str) -> T:
    """Make it; an error that its own checks raise says where the values stand."""
    try:
        return factory(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parameters_of(factory: Callable[..., Any]) -> dict[str, bool]:
    """The options a dataclass or function takes, and whether each is required."""
    if dataclasses.is_dataclass(factory):
        return {
            f.name: f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            for f in dataclasses.fields(factory)
            if f.init
        }
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.signature(factory).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in signature if p.kind in named}


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as its type hint wants it, or an error that says what would be right."""
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where)
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise UserError(f"{where}={shown(value)}: it is one of {', '.join(map(str, get_args(hint)))}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: expected keys and values, got {shown(value)}")
        return build(hint, value, where)
    if origin is not None:
        return _convert_container(value, origin, get_args(hint), where)
    return _convert_scalar(value, hint, where)


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return convert(value, option, where)
        except UserError as error:
            problems.append(str(error))
    raise UserError(problems[0] if problems else f"{where}: expected nothing, got {shown(value)}")


def _convert_container(value: Any, origin: Any, args: tuple[Any, ...], where: str) -> Any:
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: expected keys and values, got {shown(value)}")
        key_hint, value_hint = args
        return {convert(k, key_hint, where): convert(v, value_hint, f"{where}.{k}") for k, v in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"{where}: expected a list, got {shown(value)}")
        return tuple(convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
    raise UserError(f"{where}: cannot be given in a recipe")


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise UserError(f"{where}={shown(value)}: expected true or false")
    if hint in (int, float) and not isinstance(value, bool):
        number = _number(value)
        if number is not None and abs(number) <= LARGEST[hint] and (hint is float or number == int(number)):
            return hint(number)
    if hint is str and isinstance(value, str):
        return value
    expected = {int: "a whole number", float: "a number", str: "a word"}.get(hint)
    if expected is None:
        raise UserError(f"{where}={shown(value)}: cannot be given in a recipe")
    raise UserError(f"{where}={shown(value)}: expected {expected}")


def _number(value: Any) -> float | int | None:
    """YAML 1.1 reads 5e-4 as a word; people mean the number. NaN is none."""
    if isinstance(value, int | float):
        return value if value == value else None
    try:
        return _number(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def shown(value: Any) -> str:
    """A wrong value as it stands in an error message, cut short where it is long."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of several values of one key without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:  # as written: `<<` has not been followed yet
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise _DuplicateKey(f'line {key.start_mark.line + 1}: "{key.value}" is given twice')
                seen.add((key.tag, key.value))
        return node


class _DuplicateKey(Exception):
    pass


def parse_yaml(text: str, where: str) -> Any:
    """YAML without any of its ways to make objects."""
    try:
        return yaml.load(text, _Loader)
    except _DuplicateKey as error:
        raise UserError(f"{where}: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        # the last four: what PyYAML itself stumbles over, such as `!!int ""` or `!!timestamp x`
        line = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML: {line[:200]}") from None
