"""Options read from the code: `equipoise list NAME`, full recipes, and the page of all keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from equipoise.training import make_recipe, read_recipe
from equipoise.training.full_recipe import full_recipe
from equipoise.training.recipe import CATALOGUES, KEYS
from equipoise.training.recipe_files import packaged_recipes
from equipoise.training.recipe_fingerprint import fingerprint
from equipoise.training.reference import Option, entry_options, options_of, reference

PAGE = Path(__file__).parents[3] / "docs" / "recipe-keys.md"
COMPLETE = [name for name, line in packaged_recipes().items() if not line.startswith("overlay")]


@dataclass
class Base:
    """Base.

    Args:
        first: The first. More
            about it.
    """

    first: int = 3


@dataclass
class Derived(Base):
    """Derived.

    Args:
        second: The second; see there.
        third: Third.

    Raises:
        UserError: Never.
    """

    second: Literal["a", "b"] | None = None
    third: tuple[float, ...] = (0.5, 1.0)


def of_class(hidden: int, size: int = 8, rate: float = 0.1, *, extra: Any = None) -> Base:
    """A function."""
    raise NotImplementedError


def test_options_are_those_of_the_signature_and_the_docstrings() -> None:
    assert options_of(Derived) == [
        Option("first", "int", "3", "The first. More about it."),
        Option("second", "a | b | null", "null", "The second; see there."),
        Option("third", "list of float", "[0.5, 1.0]", "Third."),
    ]
    assert options_of(Derived)[0].line == "The first."
    found = {option.name: (option.type, option.default) for option in options_of(of_class)}
    assert found == {
        "hidden": ("int", "required"),
        "size": ("int", "from the data"),
        "rate": ("float", "0.1"),
        "extra": ("any", "null"),
    }


@pytest.mark.parametrize("part", CATALOGUES)
def test_every_option_has_a_type_and_a_text(part: str) -> None:
    for name in CATALOGUES[part]:
        for option in entry_options(CATALOGUES[part].group, name):
            assert option.text, (name, option.name)
            assert option.type != "any", (name, option.name)


def test_itop_has_its_own_defaults() -> None:
    defaults = {option.name: option.default for option in entry_options("topologies", "rigl-itop")}
    assert (defaults["every"], defaults["until"], defaults["drop_end"]) == ("4000", "1.0", "0.005")


@pytest.mark.parametrize("name", COMPLETE)
def test_a_full_recipe_is_the_same_recipe(name: str) -> None:
    recipe = make_recipe(read_recipe(name))
    raw = yaml.safe_load(full_recipe(recipe))
    again = make_recipe(raw)
    assert fingerprint(again) == fingerprint(recipe)  # with the options of the model
    assert replace(again, raw={}, model_options={}) == replace(recipe, raw={}, model_options={})
    assert set(KEYS) - set(raw) == {"full_pass"} - set(recipe.raw)


def test_a_full_recipe_leaves_open_what_a_run_chooses() -> None:
    recipe = make_recipe({"correction": "agent", "topology": {"name": "set", "seed": 4}, "seed": 3})
    text = full_recipe(recipe)
    raw = yaml.safe_load(text)
    assert "mode" not in raw["correction"]
    assert "  # mode: recompute" in text
    assert raw["topology"]["seed"] == 4
    assert "seed" not in yaml.safe_load(full_recipe(make_recipe({"topology": "set", "seed": 3})))["topology"]


def test_the_page_of_all_keys_is_up_to_date() -> None:
    """If not: equipoise recipe --keys > docs/recipe-keys.md."""
    assert PAGE.read_text(encoding="utf-8") == reference()


def test_the_page_names_every_key_and_every_entry() -> None:
    page = reference()
    for name in [*KEYS, *(name for catalogue in CATALOGUES.values() for name in catalogue)]:
        assert f"| `{name}` |" in page
