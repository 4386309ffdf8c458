"""Studies of milliseconds, and their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from equipoise.studies.design import read_study
from equipoise.studies.launch import here
from equipoise.studies.runner import jobs_of, run_study
from train_helpers import tiny, without_times

ARMS: dict[str, Any] = {"SGD": {}, "A + B": {"correction": {"name": "agent", "mode": "replay"}}}


def write_study(folder: Path, arms: dict[str, Any] = ARMS, **changes: Any) -> str:
    """Write a study of milliseconds to a file."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    study = {"title": "T", "recipe": "tiny.yaml", "seeds": [0, 1], "arms": arms, **changes}
    path = folder / "little.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return str(path)


def run(source: str, folder: Path, **choice: Any) -> tuple[bool, list[str]]:
    """Run a study; return whether all runs succeeded, and the printed lines."""
    lines: list[str] = []
    design = read_study(source)
    jobs = jobs_of(design, folder / "results", folder / "runs", **choice)
    return run_study(design, jobs, folder / "results", here, lines.append), lines


def results_of(folder: Path) -> dict[str, Any]:
    """The result files by name, without times."""
    found = {}
    for path in sorted((folder / "results" / "little").glob("*-seed*.json")):
        value = json.loads(path.read_text())
        value["epochs"] = [without_times(line) for line in value["epochs"]]
        value["result"].pop("seconds")
        found[path.name] = value
    return found
