"""Rewrite result files of version 1 with the words of version 2; no number changes.

    python tools/migrate_results.py results

Version 2 names the scores `plain`, `bn_recalibrated` and `ema`, and uses the recipe keys `ema`,
`bn_recalibration_batches`, `correction.mode`, `.step_fraction`, `.batch_fraction` and `.coefficient`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from equipoise.studies.results import write_result

SCORES = {"reestimated": "bn_recalibrated", "averaged": "ema"}
RECIPE = {"average": "ema", "reestimate": "bn_recalibration_batches"}
CORRECTION = {"way": "mode", "share": "step_fraction", "fraction": "batch_fraction"}
ENVIRONMENT = {"together": "jobs_on_device"}
EPOCH = {"start_up": "startup_seconds"}


def renamed(mapping: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in mapping.items()}


def coefficient(options: dict[str, Any]) -> dict[str, Any]:
    """`value: 0.1` of a correction as `coefficient: {name: fixed, value: 0.1}`."""
    if "value" not in options:
        return options
    value = options["value"]
    rest = {key: item for key, item in options.items() if key != "value"}
    return {**rest, "coefficient": {"name": "fixed", "value": value}}


def recipe(old: dict[str, Any]) -> dict[str, Any]:
    new = renamed(old, RECIPE)
    if isinstance(new.get("correction"), dict):
        new["correction"] = coefficient(renamed(new["correction"], CORRECTION))
    return new


def epoch(old: dict[str, Any]) -> dict[str, Any]:
    new = renamed(old, EPOCH)
    return {**new, "scores": renamed(new["scores"], SCORES)} if "scores" in new else new


def result(old: dict[str, Any]) -> dict[str, Any]:
    new = {**old, "version": 2, "recipe": recipe(old["recipe"])}
    new["environment"] = renamed(old["environment"], ENVIRONMENT)
    new["epochs"] = [epoch(line) for line in old["epochs"]]
    if "robust" in old:
        new["robust"] = renamed(old["robust"], SCORES)
    if "result" in old:
        new["result"] = {**old["result"], "test": renamed(old["result"].get("test", {}), SCORES)}
    return new


def claim(old: dict[str, Any]) -> dict[str, Any]:
    new = renamed(old, {"way": "score", "what": "metric"})
    return {**new, "score": SCORES.get(new["score"], new["score"])}


def study(old: dict[str, Any]) -> dict[str, Any]:
    new = {**old, "version": 2, "set": recipe(old["set"])}
    new["arms"] = {name: recipe(arm) for name, arm in old["arms"].items()}
    for key in ("claims", "paper"):
        new[key] = [claim(entry) for entry in old[key]]
    return new


def migrate(path: Path) -> bool:
    """Rewrite one file; whether it was of version 1."""
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["version"] != 1:
        return False
    new = study(old) if path.name == "study.json" else result(old)
    write_result(path, new)
    return True


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*/*.json"))
    print(f"{sum(map(migrate, files))} of {len(files)} files rewritten")
