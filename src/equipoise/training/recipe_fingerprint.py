"""The part of a recipe that a checkpoint and the run that continues it must have in common."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from equipoise.training.recipe import KEYS, Recipe, model_defaults

MAY_CHANGE = (
    # where and how fast the same numbers are computed
    "device",
    "engine",
    "precision",  # `auto` depends on the device
    "storage",  # checkpoints are converted
    "data.root",
    "data.workers",
    # the start, which a checkpoint replaces; the file may have moved
    "topology.initial_mask",
    "weights",
    # what is written and scored, which has no effect on the training
    "checkpoint",
    "data.test_batch",
    "bn_recalibration_batches",
    # settings of later steps, on which the state in the checkpoint does not depend
    "epochs",
    "optimizer.",  # the options, not the optimizer
    "schedule",
    "clip",
    "ema",
    "rollback",
)
"""Keys of a recipe, with the keys below them, that may differ between a checkpoint and the run that continues it."""


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Return everything that a checkpoint and a recipe must have in common, by key; see `MAY_CHANGE`."""
    found = {"seed": recipe.seed, "model": recipe.model}
    for part, options in (
        ("model", model_defaults(recipe.model) | dict(recipe.model_options)),
        ("data", recipe.data_options),
    ):
        found |= {f"{part}.{key}": _plain(value) for key, value in options.items()}
    for key in KEYS:
        if key not in found:
            found |= _flat(key, getattr(recipe, key))
    return {key: value for key, value in found.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    return any(key == each or key.startswith(f"{each.removesuffix('.')}.") for each in MAY_CHANGE)


def _flat(key: str, value: Any) -> dict[str, Any]:
    """Return the name of a dataclass and its fields by their keys; other values as they are."""
    if not is_dataclass(value):
        return {key: _plain(value)}
    found = {key: type(value).__name__}
    for each in fields(value):
        found |= _flat(f"{key}.{each.name}", getattr(value, each.name))
    return found


def _plain(value: Any) -> Any:
    """Return a value that checkpoints can hold."""
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
