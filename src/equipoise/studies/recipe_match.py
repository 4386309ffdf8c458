"""Whether two recipes describe the same experiment, whatever machine they ran on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.config import split
from equipoise.studies.results import rounded

OF_THE_MACHINE = ("device", "checkpoint")
SAME_ESTIMATE = ("recompute", "replay")  # modes of a correction; available memory decides between them


def same_recipe(planned: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a run of the recipe `found` answers for the recipe `planned`.

    Device, checkpoints and the folder of the data do not matter. A correction mode or a storage that `planned` leaves
    open may have been chosen.
    """
    left, right = _essence(planned), _essence(found)
    if "mode" not in left["correction"]:
        right["correction"].pop("mode", None)
    if left.get("storage", "auto") == "auto":
        right.pop("storage", None)
        left.pop("storage", None)
    return left == right


def differences(recipe: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys in which the recipes of two seeds of one arm differ.

    Device, storage, checkpoints and the folder of the data do not matter, nor does the choice between modes of the
    same estimate.
    """
    left, right = _essence(recipe), _essence(other)
    for essence in (left, right):
        if essence["correction"].get("mode") in SAME_ESTIMATE:
            del essence["correction"]["mode"]
    return [key for key in sorted({*left, *right} - {"seed", "storage"}) if left.get(key) != right.get(key)]


def _essence(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without what belongs to the machine, with its data and correction written out."""
    essence = {key: value for key, value in raw.items() if key not in OF_THE_MACHINE}
    for part, default in (("data", "digits"), ("correction", "sgd")):
        name, options = split(essence.get(part, default), part)
        essence[part] = {"name": name, **{key: value for key, value in options.items() if key != "root"}}
    return dict(rounded(essence))  # as results are written
