"""Rewrite result files of version 1 as version 2. Only names change, no numbers.

    python tools/migrate_results.py results

Version 2 names the scores `plain`, `bn_recalibrated` and `ema`, and the recipes have the keys `ema`,
`bn_recalibration_batches`, `correction.mode`, `.step_fraction`, `.batch_fraction` and a nested `.coefficient`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from equipoise.studies.results import write_result

Values = dict[str, Any]

SCORES = {"reestimated": "bn_recalibrated", "averaged": "ema"}
RECIPE = {"average": "ema", "reestimate": "bn_recalibration_batches"}
CORRECTION = {"way": "mode", "share": "step_fraction", "fraction": "batch_fraction"}
COEFFICIENT = {"loss_share": "batch_fraction"} | {
    key: key for key in ("value", "smoothing", "memory", "per_layer", "clamp")
}
QUESTION = {"way": "score", "what": "metric"}


def renamed(values: Values, names: dict[str, str]) -> Values:
    return {names.get(key, key): value for key, value in values.items()}


def correction(old: Values) -> Values:
    """Rename options, and nest those of the coefficient under its name."""
    nested = {COEFFICIENT[key]: value for key, value in old.items() if key in COEFFICIENT}
    new = renamed({key: value for key, value in old.items() if key not in COEFFICIENT}, CORRECTION)
    if not nested:
        return new
    name = new.pop("coefficient", None)
    if "value" in nested:
        linear = name == "linear" or (name is None and old["name"] == "alpha-svrg")
        name = "linear" if linear else "fixed"
        nested = renamed(nested, {"value": "start"}) if linear else nested
    return {**new, "coefficient": {"name": name, **nested} if name else nested}


def recipe(old: Values) -> Values:
    new = renamed(old, RECIPE)
    return {**new, "correction": correction(new["correction"])} if isinstance(new.get("correction"), dict) else new


def epoch(old: Values) -> Values:
    new = renamed(old, {"start_up": "startup_seconds"})
    return {**new, "scores": renamed(new["scores"], SCORES)} if "scores" in new else new


def result(old: Values) -> Values:
    new = {**old, "version": 2, "recipe": recipe(old["recipe"])}
    new["environment"] = renamed(old["environment"], {"together": "jobs_on_device"})
    new["epochs"] = [epoch(line) for line in old["epochs"]]
    if "robust" in old:
        new["robust"] = renamed(old["robust"], SCORES)
    if "result" in old:
        new["result"] = {**old["result"], "test": renamed(old["result"].get("test", {}), SCORES)}
    return new


def question(old: Values) -> Values:
    new = renamed(old, QUESTION)
    return {**new, "score": SCORES.get(new["score"], new["score"])}


def study(old: Values) -> Values:
    new = {**old, "version": 2, "set": recipe(old["set"])}
    new["arms"] = {name: recipe(arm) for name, arm in old["arms"].items()}
    return new | {key: [question(entry) for entry in old[key]] for key in ("claims", "paper")}


def migrate(path: Path) -> bool:
    """Rewrite a file if it is of version 1, and return whether it was."""
    old = json.loads(path.read_text(encoding="utf-8"))
    if old.get("version") != 1:
        return False
    write_result(path, study(old) if path.name == "study.json" else result(old))
    return True


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*/*.json"))
    print(f"{sum(map(migrate, files))} of {len(files)} files rewritten")
