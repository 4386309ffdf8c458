"""From plain text to dataclasses."""

from __future__ import annotations

import string
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.catalogue import Catalogue
from equipoise.config import build, call, checked, convert, parameters_of, parse_yaml, shown
from equipoise.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1

    def __post_init__(self) -> None:
        if self.depth > 9:
            raise UserError(f"depth={self.depth}: at most 9")


@dataclass(frozen=True, kw_only=True)
class Options:
    rate: float
    count: int = 3
    flag: bool = False
    word: str = "plain"
    choice: Literal["left", "right"] = "left"
    maybe: int | None = None
    numbers: tuple[float, ...] = ()
    table: str | Mapping[str, float] | Sequence[float] = "erk"
    inner: Inner = Inner()


class Shape:
    """The base of two dataclasses that are chosen by name."""


@dataclass(frozen=True)
class Circle(Shape):
    radius: float = 1.0


@dataclass(frozen=True)
class Square(Shape):
    side: float


SHAPES: Catalogue[type[Shape]] = Catalogue("shape", {"circle": Circle, "square": Square})


@dataclass(frozen=True, kw_only=True)
class Drawing:
    outline: Annotated[Shape, SHAPES] = Circle()
    inside: Annotated[Shape, SHAPES] | None = None


def made(**options: Any) -> Options:
    return build(Options, {"rate": 1.0, **options}, "part")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("rate", 2, 2.0),
        ("rate", "5e-4", 5e-4),  # a word to YAML 1.1
        ("rate", 0.25, 0.25),
        ("count", 4.0, 4),
        ("count", "1e3", 1000),
        ("count", 2**63 - 1, 2**63 - 1),
        ("flag", True, True),
        ("choice", "right", "right"),
        ("maybe", None, None),
        ("maybe", 7, 7),
        ("numbers", [1, "2e0", 0.5], (1.0, 2.0, 0.5)),
        ("table", "uniform", "uniform"),
        ("table", {"conv*": 1}, {"conv*": 1.0}),
        ("table", [1, 0.5], (1.0, 0.5)),
        ("inner", {"depth": 5}, Inner(depth=5)),
    ],
)
def test_values_become_what_the_type_says(name: str, given: Any, expected: Any) -> None:
    value = getattr(made(**{name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("rate", "fast", "part.rate='fast': expected a number"),
        ("rate", None, "part.rate=None: expected a number"),
        ("rate", True, "expected a number"),
        ("rate", float("nan"), "expected a number"),
        ("rate", float("inf"), "expected a number"),
        ("rate", "-inf", "expected a number"),
        ("rate", 10**400, "expected a number"),
        ("count", 1.5, "part.count=1.5: expected a whole number"),
        ("count", "1e300", "expected a whole number"),
        ("count", 2**63, "expected a whole number"),
        ("count", True, "expected a whole number"),
        ("flag", 1, "part.flag=1: expected true or false"),
        ("flag", "yes", "expected true or false"),
        ("word", 3, "part.word=3: expected a word"),
        ("choice", "up", "part.choice='up': expected one of left, right"),
        ("choice", ["left"], "expected one of left, right"),
        ("maybe", "x", "expected a whole number"),
        ("numbers", "12", "part.numbers: expected a list, got '12'"),
        ("numbers", {"a": 1}, "expected a list"),
        ("numbers", [1, "x"], "part.numbers[1]='x': expected a number"),
        ("inner", 3, "part.inner: expected keys and values, got 3"),
        ("inner", {"deep": 1}, 'part.inner: no option is called "deep"; did you mean "depth"?'),
        ("inner", {"depth": 10}, "part.inner: depth=10: at most 9"),
    ],
)
def test_a_wrong_value_is_told_with_its_place_and_what_would_be_right(name: str, given: Any, told: str) -> None:
    with pytest.raises(UserError) as error:
        made(**{name: given})
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_and_missing_options_are_told() -> None:
    with pytest.raises(UserError, match=r'part: no option is called "cuont"; did you mean "count"\?'):
        made(cuont=1)
    with pytest.raises(UserError, match="choose from choice, count, flag"):
        made(zzzz=1)
    with pytest.raises(UserError, match="part: options have names, not 7"):
        build(Options, {7: 1}, "part")  # type: ignore[dict-item]
    with pytest.raises(UserError, match="part: rate is missing"):
        build(Options, {}, "part")


def test_a_named_part_is_built_from_a_catalogue() -> None:
    assert build(Drawing, {}, "drawing") == Drawing()
    assert build(Drawing, {"outline": "circle"}, "drawing") == Drawing()
    given = {"outline": {"name": "square", "side": "2e0"}, "inside": {"name": "circle", "radius": 3}}
    assert build(Drawing, given, "drawing") == Drawing(outline=Square(2.0), inside=Circle(3.0))
    assert build(Drawing, {"inside": None}, "drawing") == Drawing()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("sqare", 'no shape is called "sqare"; did you mean "square"?'),
        ("square", "drawing.outline: side is missing"),
        ({"name": "square", "side": "wide"}, "drawing.outline.side='wide': expected a number"),
        ({"name": "circle", "side": 1}, 'drawing.outline: no option is called "side"; choose from radius'),
        ({"radius": 1}, "drawing.outline: expected a name, or keys and values with a name among them"),
        (3, "drawing.outline: expected a name"),
        (None, "drawing.outline: expected a name"),
    ],
)
def test_a_wrong_named_part_is_told(value: Any, told: str) -> None:
    with pytest.raises(UserError) as error:
        build(Drawing, {"outline": value}, "drawing")
    assert str(error.value).startswith(told)


def test_functions_are_built_like_dataclasses() -> None:
    def area(width: float, height: float = 2.0) -> float:
        return width * height

    assert parameters_of(area) == {"width": True, "height": False}
    assert build(area, {"width": "3e0"}, "area") == 6.0
    assert checked(area, {"width": 3}, "area") == {"width": 3.0}
    with pytest.raises(UserError, match="area: width is missing"):
        checked(area, {"height": 1}, "area")


def test_an_error_of_the_factory_names_the_place_and_other_errors_pass() -> None:
    def fail(kind: str) -> None:
        raise UserError("no") if kind == "user" else ZeroDivisionError

    with pytest.raises(UserError, match=r"^here: no$"):
        call(fail, {"kind": "user"}, "here")
    with pytest.raises(ZeroDivisionError):
        call(fail, {"kind": "bug"}, "here")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(name=st.sampled_from(sorted(parameters_of(Options))), value=junk)
def test_any_value_is_converted_or_refused(name: str, value: Any) -> None:
    try:
        options = made(**{name: value})
    except UserError:
        return
    result = getattr(options, name)
    expected = {"rate": float, "count": int, "flag": bool, "word": str, "choice": str, "numbers": tuple}
    assert type(result) is expected.get(name, type(result))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_survives_as_a_number_and_as_a_word(number: float) -> None:
    assert convert(number, float, "x") == number
    assert convert(repr(number), float, "x") == number


def test_long_values_are_cut_short_in_messages() -> None:
    bomb: Any = "ha"
    for _ in range(40):
        bomb = [bomb] * 10  # 10⁴⁰ leaves, shared
    for value in ("x" * 10_000, bomb, int("f" * 5000, 16)):
        assert len(shown(value)) <= 80
        with pytest.raises(UserError) as error:
            made(inner=value)
        assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "\t- x",
        "!!python/object/apply:os.system ['true']",
        "!!int ''",
        "!!timestamp x",
        "!!bool maybe",
        "!!float ''",
        "2020-13-45",
        "? [1]\n: 2",
        "\x00",
        "[" * (2 * sys.getrecursionlimit()),
        "&a [*b]",
    ],
)
def test_broken_yaml_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^file\.yaml: not valid YAML: ") as error:
        parse_yaml(text, "file.yaml")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@given(st.text(string.printable + "&*!|>%@`", max_size=30))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with suppress(UserError):
        parse_yaml(text, "text")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\nepochs: 2\nseed: 3\n", 'file: line 3: "seed" is given twice'),
        ("topology:\n  name: set\n  'name': rigl\n", 'file: line 3: "name" is given twice'),
        ("{a: 1, b: 2, a: 1}", 'file: line 1: "a" is given twice'),
        ("list:\n- {x: 1}\n- {y: 1, y: 2}\n", 'file: line 3: "y" is given twice'),
        ("1: a\n1: b\n", 'file: line 2: "1" is given twice'),
        ("base: &base {a: 1, a: 2}\nother:\n  <<: *base\n", 'file: line 1: "a" is given twice'),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        parse_yaml(text, "file")
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: {x: 1}\nb: {x: 2}\n", {"a": {"x": 1}, "b": {"x": 2}}),
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),  # a number and a word
        (
            "base: &base {a: 1, b: 2}\nmore: &more\n  <<: *base\n  b: 3\nlast:\n  <<: *more\n  a: 4\n",
            {"base": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}, "last": {"a": 4, "b": 3}},
        ),
        ("x: &x {a: 1}\ny: &y {a: 2}\nz:\n  <<: [*x, *y]\n", {"x": {"a": 1}, "y": {"a": 2}, "z": {"a": 1}}),
    ],
)
def test_keys_that_are_told_apart_and_merged_ones_are_taken(text: str, expected: Any) -> None:
    assert parse_yaml(text, "file") == expected


def test_what_makes_objects_is_still_refused() -> None:
    with pytest.raises(UserError, match="file: not valid YAML: could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []", "file")
