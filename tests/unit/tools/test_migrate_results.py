"""tools/migrate_results.py: results of version 1 are readable afterwards, with the same numbers."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.studies.reading import read_results
from equipoise.studies.results import write_result
from study_helpers import CLAIM, result_json

TOOL = Path(__file__).parents[3] / "tools" / "migrate_results.py"


def version_1(seed: int) -> dict[str, Any]:
    """A result as version 1 wrote it."""
    text = json.dumps({**result_json("AGENT", seed), "version": 1})
    for new, old in {"bn_recalibrated": "reestimated", "ema": "averaged", "startup_seconds": "start_up"}.items():
        text = text.replace(f'"{new}"', f'"{old}"')
    value: dict[str, Any] = json.loads(text)
    value["environment"]["together"] = 1
    value["recipe"] |= {
        "average": 0.9,
        "reestimate": 5,
        "correction": {"name": "fixed", "way": "replay", "value": 0.5},
    }
    return value


def test_results_of_version_1_are_rewritten_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results" / "s"
    claim = {**CLAIM, "than": "AGENT", "way": "averaged", "threshold": None}
    paper = {"arm": "AGENT", "what": "accuracy", "way": "plain", "value": 0.5}
    arms = {"AGENT": {"correction": {"name": "agent", "smoothing": 0.5}}}
    asked = {"version": 1, "name": "s", "set": {"average": 0.9}, "arms": arms, "claims": [claim], "paper": [paper]}
    write_result(folder / "study.json", asked)
    write_result(folder / "agent-seed0.json", version_1(0))
    problems = read_results(tmp_path / "results").problems
    line = f"it is of version 1; `python tools/migrate_results.py {tmp_path / 'results'}` rewrites it"
    assert [problem.endswith(line) for problem in problems] == [True, True]
    monkeypatch.setattr(sys, "argv", ["migrate_results.py", str(tmp_path / "results")])
    runpy.run_path(str(TOOL), run_name="__main__")
    reading = read_results(tmp_path / "results")
    assert reading.problems == ()
    (found,) = reading.studies[0].results["AGENT"]
    assert [epoch.scores for epoch in found.epochs][1] == dict.fromkeys(("plain", "bn_recalibrated", "ema"), 0.2)
    assert found.recipe["ema"] == 0.9
    assert found.recipe["bn_recalibration_batches"] == 5
    coefficient = {"name": "fixed", "value": 0.5}
    assert found.recipe["correction"] == {"name": "fixed", "mode": "replay", "coefficient": coefficient}
    assert found.environment["jobs_on_device"] == 1
    assert (reading.studies[0].claims[0].score, reading.studies[0].paper[0].metric) == ("ema", "accuracy")
    arm = json.loads((folder / "study.json").read_text())["arms"]["AGENT"]
    assert arm["correction"] == {"name": "agent", "coefficient": {"smoothing": 0.5}}
