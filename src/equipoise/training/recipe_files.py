"""Read recipes from YAML, merge them, and set single keys of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from equipoise.catalogue import suggestion
from equipoise.config import parameters_of, parse_yaml
from equipoise.errors import UserError
from equipoise.training.build_recipe import refuse_old_names, without_suffix
from equipoise.training.recipe import CATALOGUES, DEFAULT_NAMES, DataOptions


def read_recipe(*sources: str) -> dict[str, Any]:
    """Read recipes and merge them; later ones override earlier ones, see `lay_over`.

    Args:
        sources: Files, or names of packaged recipes. A recipe may name another one, or a list of them, as its `base`.
    """
    result: dict[str, Any] = {}
    for source in sources:
        result = lay_over(result, _read_with_base(source, []))
    return result


def _read_with_base(source: str, seen: list[str]) -> dict[str, Any]:
    raw = _read_one(source)
    bases = raw.pop("base", [])
    result: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else [None]:
        if not isinstance(base, str):
            raise UserError(f"{source}: base is the name or the file of another recipe, or a list of them")
        if _is_file_name(base):
            base = os.path.normpath(Path(source).parent / base)
        if base in seen:
            raise UserError(f"{source}: its base leads back to itself")
        result = lay_over(result, _read_with_base(base, [*seen, source, base]))
    return lay_over(result, raw) if bases else raw


def lay_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two recipes.

    A part of `over` with the same name as in `base`, or without a name, adds its options; a part with another name
    replaces the one in `base`, of which it keeps the options that it lists under `keep`.
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        old = {"name": old} if isinstance(old, str) and key in DEFAULT_NAMES else old
        if isinstance(value, Mapping):
            value, old = dict(value), old if isinstance(old, Mapping) else {}
            kept = value.pop("keep", ()) if key in DEFAULT_NAMES else ()
            renamed = value.get("name", old.get("name")) != old.get("name")
            value = {**{option: old[option] for option in old if not renamed or option in kept}, **value}
        result[key] = value
    return result


def _read_one(source: str) -> dict[str, Any]:
    if _is_file_name(source) or os.path.isfile(source):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the recipe {source}: {error}") from None
    elif source in (known := packaged_recipes()):
        text = (resources.files("equipoise") / "recipes" / f"{source}.yaml").read_text()
    else:
        hint = suggestion(source, list(known))
        raise UserError(f'no recipe is called "{source}" and there is no such file{hint}')
    raw = parse_yaml(text, source)
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise UserError(f"{source}: a recipe is keys and values, such as `model: vgg_c`")
    refuse_old_names(raw, source)
    return dict(raw)


def _is_file_name(source: str) -> bool:
    return source.endswith((".yaml", ".yml"))


def packaged_recipes() -> dict[str, str]:
    """Return the comment in the first line of every packaged recipe, by name."""
    folder = resources.files("equipoise") / "recipes"
    files = {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}
    return {name: files[name].read_text().partition("\n")[0].lstrip("# ") for name in sorted(files)}


def dump_recipe(raw: Mapping[str, Any]) -> str:
    """Return a recipe as YAML."""
    return yaml.safe_dump(dict(raw), sort_keys=False)


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set `key=value` and `part.key=value` in a copy of a recipe.

    A part that gets another name keeps the options that both have.
    """
    result = copy.deepcopy(dict(raw))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f'"{override}" is not an override; write key=value, such as topology.sparsity=0.95')
        _set(result, key, parse_yaml(text, override))
    return result


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    inner, defaults = raw, DEFAULT_NAMES
    for word in outer:
        found = inner.get(word, defaults.get(word))
        found = {"name": found} if isinstance(found, str) else {} if found is None else found
        if not isinstance(found, dict):
            raise UserError(f'"{word}" has no options, so "{key}" cannot be set')
        inner[word] = found
        inner, defaults = found, {}
    inner[last] = value if outer or not isinstance(value, str) else _renamed(last, raw.get(last), value)


def _renamed(part: str, old: Any, name: str) -> Any:
    """Return a part under another name, with the options that the new one has too."""
    if not isinstance(old, dict) or "name" not in old:
        return name
    known = set(old)
    if part in CATALOGUES:
        base = without_suffix(name)[0] if part == "topology" else name
        known = {*parameters_of(CATALOGUES[part][base]), *(parameters_of(DataOptions) if part == "data" else ())}
    return {**{key: item for key, item in old.items() if key in known}, "name": name}
