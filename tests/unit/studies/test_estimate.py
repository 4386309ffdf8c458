"""The time that the missing jobs of a study take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.display.tables import duration
from equipoise.studies.design import read_study
from equipoise.studies.estimate import estimate
from equipoise.studies.runner import jobs_of
from equipoise.training.run_folder import RunFolder
from study_run_helpers import ARMS, run, write_study

# AGENT by replay: as many gradients at the snapshot as in the steps, and the losses of a tenth of the batches, each a
# third of a gradient.
REPLAY = 2 + 0.1 / 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (12_000, "3 h 20 min")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def left(source: str, folder: Path) -> dict[str, Any]:
    jobs = jobs_of(read_study(source), folder / "results", folder / "runs")
    return {name.removeprefix("little, "): seconds for name, seconds in estimate(jobs).items()}


def finished_in(path: Path, **changes: Any) -> None:
    """Change what a result says about the seconds and the device of a run."""
    value = json.loads(path.read_text())
    value["epochs"][-1]["seconds"] = changes.pop("seconds")
    value["environment"] |= changes
    path.write_text(json.dumps(value))


def test_seconds_come_from_runs_of_this_device(tmp_path: Path) -> None:
    source = write_study(tmp_path)
    run(source, tmp_path, only=["SGD"], seeds=[0])
    file = tmp_path / "results/little/sgd-seed0.json"
    finished_in(file, seconds=10.0)
    expected = {"A + B, seed 0": 10 * REPLAY, "SGD, seed 1": 10.0, "A + B, seed 1": 10 * REPLAY}
    assert left(source, tmp_path) == pytest.approx(expected)
    jobs = jobs_of(read_study(source), tmp_path / "results", tmp_path / "runs", only=["A + B"], seeds=[0])
    RunFolder.create(jobs[0].folder, jobs[0].recipe).append({"epoch": 1, "seconds": 3.0})
    assert left(source, tmp_path)["A + B, seed 0"] == 3.0  # one of two epochs is left
    finished_in(file, seconds=10.0, device="a GPU of nowhere")
    assert 0 < left(source, tmp_path)["SGD, seed 1"] < 10


def test_without_results_a_few_steps_are_timed_and_nothing_is_written(tmp_path: Path) -> None:
    source = write_study(tmp_path, {**ARMS, "far": {"data": {"name": "cifar10", "root": str(tmp_path)}}}, seeds=[0])
    before = sorted(tmp_path.rglob("*"))
    found = left(source, tmp_path)
    assert 0 < found["SGD, seed 0"] == pytest.approx(found["A + B, seed 0"] / REPLAY)
    assert "CIFAR-10: no data_batch_1" in found["far, seed 0"]
    assert sorted(tmp_path.rglob("*")) == before
