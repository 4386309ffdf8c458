"""Build dataclasses from plain values, as YAML and the command line give them.

Names are strict, types are checked, and a wrong value is an error of one line that says what would be right.
"""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from equipoise.catalogue import suggestion
from equipoise.errors import UserError

T = TypeVar("T")
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}  # the range of torch's int64 and float64
EXPECTED = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}


def build(factory: Callable[..., T], options: Mapping[str, Any], where: str) -> T:
    """Call a dataclass or function with options that are checked against its signature.

    Args:
        factory: A dataclass or a function with type hints.
        options: Plain values by name.
        where: What the options belong to. Every error message begins with it.

    Raises:
        UserError: If an option is unknown, missing or of the wrong type, or if `factory` refuses it.
    """
    return call(factory, checked(factory, options, where), where)


def checked(
    factory: Callable[..., Any], options: Mapping[str, Any], where: str, supplied: Iterable[str] = ()
) -> dict[str, Any]:
    """Convert options to the types of a dataclass or function, see `build`.

    Args:
        factory: A dataclass or a function with type hints.
        options: Plain values by name.
        where: What the options belong to.
        supplied: Parameters that the caller gives a value later, so that they are not missing.
    """
    known = parameters_of(factory)
    if not takes_any_name(factory):
        check_names(options, known, where)
    hints = hints_of(factory)
    values = {key: convert(value, hints.get(key, Any), f"{where}.{key}") for key, value in options.items()}
    missing = [name for name, required in known.items() if required and name not in (*values, *supplied)]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing")
    return values


def check_names(options: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise a `UserError` for a name that is not in `known`."""
    for name in options:
        if not isinstance(name, str):
            raise UserError(f"{where}: options have names, not {shown(name)}")
        if name not in known:
            raise UserError(f'{where}: no option is called "{name}"{suggestion(name, sorted(known))}')


def call(factory: Callable[..., T], values: Mapping[str, Any], where: str) -> T:
    """Call `factory` and put `where` before the message of a `UserError`."""
    try:
        return factory(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parameters_of(factory: Callable[..., Any]) -> dict[str, bool]:
    """Return the named parameters of a dataclass or function, and whether each is required."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is inspect.Parameter.empty for p in _signature(factory) if p.kind in named}


def takes_any_name(factory: Callable[..., Any]) -> bool:
    """Return whether a function takes options of any name (`**options`)."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _signature(factory))


def hints_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of the parameters of a dataclass, class or function."""
    plain_class = isinstance(factory, type) and not dataclasses.is_dataclass(factory)
    try:
        return typing.get_type_hints(factory.__init__ if plain_class else factory, include_extras=True)
    except (NameError, TypeError):  # hints that exist only for type checkers, or a callable object
        return {}


def _signature(factory: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters.values()
    except ValueError:  # a class or function in C
        return ()


def split(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of `rigl` or `{name: rigl, sparsity: 0.9}`."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {key: item for key, item in value.items() if key != "name"}
    raise UserError(f"{where}: expected a name, or keys and values with a name among them")


def convert(value: Any, hint: Any, where: str) -> Any:
    """Convert a plain value to its type hint.

    Scalars, `Literal`, unions, sequences, mappings and dataclasses are supported. So is `Annotated[Base, catalogue]`,
    in which `catalogue` maps names to factories of `Base`: the value is a name, or a mapping with a name and options.
    For example, with

        coefficient: Annotated[Coefficient, COEFFICIENTS] = LossCoefficient()

    in a dataclass, `coefficient: loss` and `coefficient: {name: loss, smoothing: 0.3}` both build
    `COEFFICIENTS["loss"]`.

    Args:
        value: As YAML gives it.
        hint: The type hint, with its `Annotated` metadata.
        where: The option that the value belongs to. Every error message begins with it.

    Raises:
        UserError: If the value does not fit the hint.
    """
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if origin is Annotated:
        name, options = split(value, where)
        return build(hint.__metadata__[0][name], options, where)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where)
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise UserError(f"{where}={shown(value)}: expected one of {', '.join(map(str, get_args(hint)))}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, _mapping(value, where), where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = get_args(hint)
        return {convert(k, key, where): convert(v, item, f"{where}.{k}") for k, v in _mapping(value, where).items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"{where}: expected a list, got {shown(value)}")
        return tuple(convert(item, get_args(hint)[0], f"{where}[{i}]") for i, item in enumerate(value))
    return _convert_scalar(value, hint, where)


def _convert_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    """Convert to the first member that fits; else raise the error of the first."""
    if value is None and type(None) in members:
        return None
    problems = []
    for member in members:
        if member is not type(None):
            try:
                return convert(value, member, where)
            except UserError as error:
                problems.append(error)
    raise problems[0]


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected keys and values, got {shown(value)}")
    return value


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint in (bool, str) and isinstance(value, hint):
        return value
    if hint in (int, float) and not isinstance(value, bool):
        number = _number(value)
        if number is not None and abs(number) <= LARGEST[hint] and (hint is float or number == int(number)):
            return hint(number)
    if hint not in EXPECTED:
        raise UserError(f"{where}={shown(value)}: this option cannot be set from a file or the command line")
    raise UserError(f"{where}={shown(value)}: expected {EXPECTED[hint]}")


def _number(value: Any) -> float | int | None:
    """Read `5e-4` as a number, which YAML 1.1 reads as a word. NaN is not a number."""
    if isinstance(value, int | float):
        return value if value == value else None
    try:
        return _number(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def shown(value: Any) -> str:
    """Format a wrong value for an error message, in at most 80 characters."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML into plain values. No tag can make an object, and a key that occurs twice is an error.

    Args:
        text: The YAML document.
        where: The name of the document. Every error message begins with it.
    """
    import yaml  # here, because `import equipoise` needs torch, numpy and safetensors only

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:  # before `<<` is followed
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in seen:
                        raise UserError(f'{where}: line {key.start_mark.line + 1}: "{key.value}" is given twice')
                    seen.add((key.tag, key.value))
            return node

    def number(loader: Loader, node: yaml.ScalarNode) -> Any:
        """A number; YAML 1.1 would read the pattern 2:4 as minutes and seconds."""
        if ":" in node.value:
            return node.value
        return {"int": loader.construct_yaml_int, "float": loader.construct_yaml_float}[node.tag.split(":")[-1]](node)

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", number)
    try:
        return yaml.load(text, Loader)
    except UserError:
        raise
    # PyYAML raises the last four for input such as `!!int ""` and `!!timestamp x`.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
