"""The charts of README and docs: what they show, what they leave out, and when they are stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import charts
from equipoise.studies.results import result_file, write_result
from study_helpers import result_json, write_study


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository without results."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(charts, "ROOT", tmp_path)
    monkeypatch.setattr(charts, "BENCH", tmp_path / "bench" / "results")
    return tmp_path


def write_cpu(root: Path, **runs: list[tuple[float, float]]) -> None:
    """Write runs by kind, as minutes and accuracy."""
    lines = [
        {"arm": f"{kind}, {k}", "seed": 0, "accuracy": accuracy, "seconds": 60 * minutes}
        for kind, found in runs.items()
        for k, (minutes, accuracy) in enumerate(found)
    ]
    file = root / "bench" / "results" / "cpu_accuracy.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")


def write_gpu(root: Path, arms: dict[str, tuple[float, float | None]]) -> None:
    """Write two runs of each arm with an accuracy and, if it is known, the seconds of training."""
    folder = write_study(root / "results" / "time-to-accuracy", list(arms))
    for arm, (accuracy, seconds) in arms.items():
        for seed, shift in ((0, -0.01), (1, 0.01)):
            value = result_json(arm, seed)
            value["result"]["test"]["plain"]["accuracy"] = accuracy + shift
            value["environment"]["jobs_on_device"] = 1 if seconds else 2
            value["epochs"][-1]["seconds"] = seconds or 999.0
            write_result(result_file(folder, arm, seed), value)


def deploy_entry(sparsity: float, size: int, one: float, many: float) -> dict[str, Any]:
    dense = {"PyTorch": [0.02, 0.4], "PyTorch channels_last": [0.01, 0.5], "onnxruntime": [0.005, 0.3]}
    return {
        "model": "VGG-C",
        "sparsity": sparsity,
        "threads": 2,
        "cpu_time": False,
        "onnx_bytes": 1000,
        "dense_bytes": 1000,
        "file_bytes": size,
        "int8_bytes": size // 2,
        "seconds": {"equipoise": [one, many], **dense},
    }


def test_nothing_is_drawn_without_results(root: Path) -> None:
    assert charts.time_to_accuracy() is None
    assert charts.deploy() is None
    assert charts.stale_charts(True, root / "docs") == []
    assert not list((root / "docs").iterdir())


def test_a_panel_without_a_run_of_ours_is_left_out(root: Path) -> None:
    write_cpu(root, float32=[(10, 0.8)])
    assert charts.time_to_accuracy() is None
    write_cpu(root, float32=[(10, 0.8)], sparse=[(5, 0.81)])
    found = charts.time_to_accuracy()
    assert found == {"two CPU cores": {"dense, float32": [(10, 80, 0)], charts.OURS: [(5, 81, 0)]}}


def test_the_gpu_panel_has_means_over_runs_and_times_of_runs_alone_on_the_device(root: Path) -> None:
    write_gpu(
        root, {"fast, 8 epochs": (0.85, 6.0), "SET-ITOP published, 50 epochs": (0.84, None), "other": (0.1, 1.0)}
    )
    found = charts.gpu_points()
    assert set(found) == {charts.OURS}  # no time is known of the other arm
    assert found[charts.OURS][0] == pytest.approx((6, 85, 2**0.5))
    lines = [{"stages": {}}, {"train": "vgg_c-fast", "epochs": 4, "seconds": 2.0}]
    (root / "bench" / "results" / "startup.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (published,) = charts.gpu_points()[charts.FAMILIES["SET-ITOP published"]]
    assert published == pytest.approx((25, 84, 2**0.5))


def test_the_finding_names_the_first_budget_that_ends_at_what_all_reach() -> None:
    panel = {
        "dense": [charts.Point(10, 80, 0), charts.Point(20, 90, 0)],
        charts.OURS: [charts.Point(4, 84, 0), charts.Point(6, 86, 0), charts.Point(9, 85, 0)],
    }
    assert charts.fastest(panel, "min") == "86.0 % in 6 min (ours), 20 min (dense)"


def test_the_chart_over_epochs_has_all_arms_and_names_the_first_budget_that_reaches_the_published(root: Path) -> None:
    arms = {"fast, 8 epochs": 0.84, "fast, 12 epochs": 0.87, "fast, 25 epochs": 0.89, "dense, 8 epochs": 0.9}
    arms |= {
        "SET-ITOP published, 50 epochs": 0.845,
        "RigL-ITOP published, 40 epochs": 0.85,
        "VGG-16 x, 5 epochs": 0.9,
    }
    write_gpu(root, {arm: (accuracy, None) for arm, accuracy in arms.items()})
    panel = charts.epochs_to_accuracy()
    assert panel is not None
    assert [point.time for point in panel["fast"]] == [8, 12, 25]
    assert set(panel) == {"fast", "dense", "SET-ITOP published", "RigL-ITOP published"}
    assert (
        charts.fewest(panel)
        == "12 epochs of the fast recipe end 2.0 points above RigL-ITOP as published in 40 epochs"
    )
    panel["fast"] = panel["fast"][:1]
    assert charts.fewest(panel).startswith("8 epochs of the fast recipe end 1.0 points below RigL-ITOP")


def test_a_chart_is_stale_once_its_data_changes(root: Path) -> None:
    write_cpu(root, sparse=[(5, 0.81), (8, 0.85)], float32=[(9, 0.8)], bf16=[(7, 0.8)])
    (root / "bench" / "results" / "deploy.json").write_text(json.dumps([deploy_entry(0.99, 10, 1e-3, 0.04)]))
    docs = root / "docs"
    names = [
        "docs/time-to-accuracy.png: the results give another chart",
        "docs/deploy.png: the results give another chart",
    ]
    assert charts.stale_charts(False, docs) == names
    assert not list(docs.iterdir())
    assert charts.stale_charts(True, docs) == names
    assert charts.stale_charts(False, docs) == []
    write_cpu(root, sparse=[(5, 0.82)])
    assert charts.stale_charts(False, docs) == names[:1]
