"""The charts of README and docs: what they show, what they leave out, and when they are stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

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


def test_on_shared_cores_the_panel_has_processor_time_and_only_recipes_without_overrides(root: Path) -> None:
    run = {"seed": 0, "accuracy": 0.8, "seconds": 1200, "processor_seconds": 600, "threads": 1}
    arms = [("sparse, 8", 0.84), ("sparse, 8", 0.86), ("sparse, 8, optimizer.lr=1", 0.1), ("bf16 5", 0.8)]
    lines = [{**run, "arm": arm, "accuracy": accuracy, "load_after": 3.2} for arm, accuracy in arms]
    lines += [{**run, "arm": "float32, 5", "accuracy": None, "load_after": 3.2}]
    (root / "bench" / "results" / "cpu_accuracy.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    name, panel = charts.cpu_points()
    assert name == "one CPU core, processor time"
    assert set(panel) == {charts.OURS, "dense, bf16"}
    assert panel[charts.OURS] == [pytest.approx((10, 85, 2**0.5))]


def test_training_of_which_only_steps_were_timed_is_a_line_without_accuracy(root: Path) -> None:
    run = {"seed": 0, "seconds": 120, "steps": 100}
    lines = [{**run, "arm": "sparse, 10", "accuracy": 0.86}, {**run, "arm": "float32, 5", "accuracy": None}]
    (root / "bench" / "results" / "cpu_accuracy.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = charts.time_to_accuracy()
    assert found is not None
    assert found["two CPU cores"]["dense, float32"] == [(1, None, 0)]  # 5 epochs of 10 steps
    assert charts.fastest(found["two CPU cores"], "min") == "86.0 % in 2 min (ours)"
    charts.draw_time_to_accuracy(found, root / "chart.png", "x")


def test_two_panels_are_drawn_side_by_side(root: Path) -> None:
    write_gpu(root, {"fast, 8 epochs": (0.85, 6.0), "dense, 8 epochs": (0.87, 6.0)})
    widths = []
    for minutes in ([], [(5.0, 0.81)]):
        write_cpu(root, sparse=minutes, float32=[(9, 0.8)])
        found = charts.time_to_accuracy()
        assert found is not None
        charts.draw_time_to_accuracy(found, root / "chart.png", "x")
        with Image.open(root / "chart.png") as image:
            widths.append(image.width)
    assert widths[1] == 2 * widths[0]


def test_patterns_are_placed_by_their_speed_and_the_title_names_the_fastest(root: Path) -> None:
    arms = {
        "dense": 0.9,
        "unstructured 50 %": 0.89,
        "unstructured 90 %": 0.87,
        "2:4": 0.88,
        "3:32": 0.86,
        "16x1 90 %": 0.8,
    }
    folder = write_study(root / "results" / "patterns", [*arms, "2:4 AGENT"])
    for arm, accuracy in arms.items():
        for seed in (0, 1):
            value = result_json(arm, seed)
            value["result"]["test"]["plain"]["accuracy"] = accuracy
            write_result(result_file(folder, arm, seed), value)
    assert charts.patterns() is None  # no speeds yet
    speeds = {"unstructured 50 %": 1.1, "unstructured 90 %": 2.0, "2:4": 1.2, "3:32": 4.0, "1:64": 9.0}
    text = json.dumps({task: {"speedup": speeds} for task in ("train", "infer")})
    (root / "bench" / "results" / "patterns-cpu.json").write_text(text)
    found = charts.patterns()
    assert found is not None
    train = found["tasks"]["train"]
    assert [arm[3] for arm in train["n:m"]] == ["2:4", "3:32"]
    assert train["n:m"][1][:3] == pytest.approx((4.0, 86.0, 0.0))
    assert set(train) == {"unstructured", "n:m"}  # the others have no speed
    assert charts.quickest(found["dense"], train) == (
        "3:32 trains 4.0 times as fast as dense and ends 4.0 points below it;\n"
        "single weights at 90 %: 2.0 times as fast, 3.0 points below"
    )
    charts.draw_patterns(found, root / "docs" / "patterns.png", "x")


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
        == "12 epochs of the fast recipe end 2.0 points above RigL-ITOP as published in 40 epochs;\n"
        "dense training ends above it in 8"
    )
    panel["fast"] = panel["fast"][:1]
    assert charts.fewest(panel).startswith("8 epochs of the fast recipe end 1.0 points below RigL-ITOP")
    assert charts.fewest(panel).endswith(",\nand 6.0 points below dense training in as many")


def test_points_that_would_cover_those_of_another_arm_are_drawn_aside() -> None:
    panel = {"a": [charts.Point(50, 84.8, 0)], "b": [charts.Point(50, 84.9, 0)], "c": [charts.Point(50, 86, 0)]}
    assert [charts.aside(panel, arm) > 0 for arm in panel] == [False, True, False]


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
