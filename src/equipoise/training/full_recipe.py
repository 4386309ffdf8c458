"""A recipe with all its keys and defaults, to be copied and edited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from equipoise.training.recipe import CATALOGUES, KEYS, MODEL_OPTIONS_OF_DATA, DataOptions, Recipe, model_defaults
from equipoise.training.reference import Option, as_yaml, options_of, plain

CHOSEN = {"correction": ("mode",), "topology": ("seed",)}
"""Options that a run chooses if a recipe does not set them."""


def full_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML with every key and a comment for each; `make_recipe` makes the same recipe from it.

    A key that a run chooses unless a recipe sets it is a comment.
    """
    return "\n".join(_lines(recipe)) + "\n"


def _lines(recipe: Recipe) -> Iterator[str]:
    texts = {option.name: option for option in options_of(Recipe)}
    for key in KEYS:
        value = _part(recipe, key) if key in CATALOGUES else plain(getattr(recipe, key))
        mark = "# " if key == "full_pass" and key not in recipe.raw else ""
        if not isinstance(value, Mapping):
            yield _line(f"{mark}{key}", value, texts.get(key))
            continue
        yield f"{key}:"
        given = recipe.raw.get(key)
        options = {option.name: option for option in _options(recipe, key)}
        for name, item in value.items():
            chosen = name in CHOSEN.get(key, ()) and not (isinstance(given, Mapping) and name in given)
            yield _line(f"  {'# ' if chosen else ''}{name}", item, options.get(name))


def _line(key: str, value: Any, option: Option | None) -> str:
    line = f"{key}: {as_yaml(value)}"
    return f"{line}  # {option.line}" if option is not None and option.line else line


def _options(recipe: Recipe, key: str) -> list[Option]:
    """Return the options that describe the lines of a key."""
    if key not in CATALOGUES:
        return options_of(type(getattr(recipe, key)))
    found = options_of(CATALOGUES[key][_name(recipe, key)])
    return [*options_of(DataOptions), *found] if key == "data" else found


def _name(recipe: Recipe, part: str) -> str:
    """Return the name of a part; the options of `rigl-itop` are written out as those of `rigl`."""
    if part in ("model", "data"):
        return recipe.model if part == "model" else recipe.data.name
    kind = type(getattr(recipe, part))
    return next(name for name, entry in CATALOGUES[part].items() if entry is kind)


def _part(recipe: Recipe, part: str) -> dict[str, Any]:
    name = _name(recipe, part)
    if part == "model":
        own = {key: value for key, value in model_defaults(name).items() if key not in MODEL_OPTIONS_OF_DATA}
        return {"name": name, **own, **recipe.model_options}
    if part == "data":
        return {**plain(recipe.data), **recipe.data_options}
    return {"name": name, **plain(getattr(recipe, part))}
