"""From the mapping of a recipe file to a recipe, with every name and value checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, get_type_hints

from equipoise.catalogue import names_code
from equipoise.config import build, call, check_names, checked, convert, parameters_of, split, takes_any_name
from equipoise.data import DATASETS
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.topology import ALGORITHMS, Algorithm, Dynamic
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

OLD_NAMES = {
    "average": "ema",
    "reestimate": "bn_recalibration_batches",
    "correction.way": "correction.mode",
    "correction.share": "correction.step_fraction",
    "correction.fraction": "correction.batch_fraction",
    "correction.value": "correction.coefficient: {name: fixed, value: ...}",
}
"""Keys of earlier versions, and their names now."""


def make_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Check a mapping as read from YAML and build every part of it.

    Raises:
        UserError: If a key is unknown or a value is wrong.
    """
    refuse_old_names(raw, "recipe")
    for key in raw:
        if key not in KEYS and (keys := keys_of(str(key))):
            raise UserError(f'recipe: "{key}" is not a key of a recipe; write {" or ".join(keys)}')
    check_names(raw, KEYS, "recipe")
    full = {**DEFAULT_NAMES, **raw}
    model, options = split(full["model"], "model")
    data, data_options = _data(full["data"])
    values: dict[str, Any] = {
        "model": model,
        "model_options": checked(MODELS[model], options, "model", MODEL_OPTIONS_OF_DATA),
        "data": data,
        "data_options": data_options,
        "topology": _topology(full["topology"], convert(full.get("seed", 0), int, "seed")),
    }
    hints = get_type_hints(Recipe, include_extras=True)
    values |= {key: convert(value, hints[key], key) for key, value in full.items() if key not in values}
    return Recipe(**values, raw=copy.deepcopy(dict(raw)))


def keys_of(option: str) -> list[str]:
    """Return the keys of a recipe that an option may mean: `lr` is `optimizer.lr`; none if it is not known."""
    if option in KEYS:
        return [option]
    owners: dict[str, list[Any]] = {part: [*catalogue.values()] for part, catalogue in CATALOGUES.items()}
    owners["data"] = [DataOptions]
    owners |= {"checkpoint": [CheckpointOptions], "rollback": [RollbackOptions]}
    return [
        f"{part}.{option}" for part, entries in owners.items() if any(option in parameters_of(e) for e in entries)
    ]


def _data(value: Any) -> tuple[DataOptions, dict[str, Any]]:
    """Build the options that all datasets have, and check the other options against the function of this dataset."""
    name, options = split(value, "data")
    reader, common = DATASETS[name], parameters_of(DataOptions)
    if not takes_any_name(reader):
        check_names(options, {*common, *parameters_of(reader)}, "data")
    own = {key: item for key, item in options.items() if key not in common}
    rest = {key: item for key, item in options.items() if key in common}
    return build(DataOptions, {"name": name, **rest}, "data"), checked(reader, own, "data", supplied=["root"])


def import_code(raw: Mapping[str, Any]) -> None:
    """Import the code that a recipe names as `package.module:attribute`, so that `make_recipe` accepts the names.

    Call it only with names that the user has typed or approved.

    Raises:
        UserError: If the import fails.
    """
    for part, name in code_in(raw).items():
        CATALOGUES[part].import_code(name)


def code_in(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the form `package.module:attribute` in a recipe, by part."""
    values = {part: raw.get(part) for part in CATALOGUES}
    named = {part: value.get("name") if isinstance(value, Mapping) else value for part, value in values.items()}
    names = {part: without_suffix(str(name))[0] for part, name in named.items()}
    return {part: name for part, name in names.items() if names_code(name)}


def _topology(value: Any, seed: int) -> Algorithm:
    """Build an algorithm by name; the suffixes `-itop` and `-fast` change its defaults."""
    name, options = split(value, "topology")
    base, suffix = without_suffix(name)
    cls = ALGORITHMS[base]
    options = {"seed": seed, **options}
    if not suffix:
        return build(cls, options, "topology")
    if not issubclass(cls, Dynamic):
        raise UserError(f'topology: "{base}" has no schedule of updates, so there is no "{name}"')
    return call(cls.itop if suffix == "itop" else cls.fast, checked(cls, options, "topology"), "topology")


def without_suffix(name: str) -> tuple[str, str]:
    """Split the name of a topology, such as `rigl-itop`, into algorithm and suffix."""
    base, _, suffix = name.rpartition("-")
    return (base, suffix) if suffix in ("itop", "fast") else (name, "")


def refuse_old_names(raw: Mapping[str, Any], where: str) -> None:
    """Refuse keys of earlier versions; the error gives their names now and begins with `where`."""
    for old, new in OLD_NAMES.items():
        part, _, key = old.rpartition(".")
        options = raw.get(part) if part else raw
        if isinstance(options, Mapping) and key in options:
            raise UserError(f'{where}: "{old}" is now called "{new}"')
