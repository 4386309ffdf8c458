"""Time to an accuracy on CPU cores: what is read from the measurements, and what is said about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cpu_times

STEPS = 100  # of an epoch


def run(arm: str, accuracy: float | None, seconds: float, **options: Any) -> dict[str, Any]:
    """A line as bench/cpu_accuracy.py writes it; `seconds` are those of an epoch."""
    epochs = int(arm.split(",")[1])
    steps = 40 if accuracy is None else STEPS * epochs
    total = seconds * steps / STEPS
    line = {"arm": arm, "seed": 0, "accuracy": accuracy, "steps": steps, "steps_per_epoch": STEPS, "seconds": total}
    line |= {"processor_seconds": 1.5 * total, "threads": 2, "process": total + 60, "load_after": 2.0}
    return line | options


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cpu_accuracy.jsonl"


def read(file: Path, *lines: dict[str, Any]) -> cpu_times.Measured:
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return cpu_times.read(file)


def on_gpu(dense: dict[int, list[float]]) -> dict[str, dict[int, list[float]]]:
    return {"bf16": dense, "float32": dense}


RUNS = (
    run("sparse, 5", 0.79, 60),
    run("sparse, 10", 0.85, 60),
    run("sparse, 10", 0.87, 66),
    run("bf16, 3", 0.80, 240),
    run("bf16, 6", 0.86, 240),
    run("float32, 6", None, 480),
)


def test_nothing_is_said_without_measurements(file: Path) -> None:
    measured = cpu_times.read(file)
    assert cpu_times.compare(measured) is None
    assert cpu_times.table(measured) == "Not measured."
    assert len(cpu_times.short_table(measured).splitlines()) == 2
    assert cpu_times.finding(measured) == cpu_times.explanation(measured) == ""


def test_the_shortest_trainings_that_reach_an_accuracy_are_compared(file: Path) -> None:
    measured = read(file, *RUNS)
    found = cpu_times.compare(measured)
    assert found is not None
    assert found.bf16 is not None
    assert (found.target, found.ours.epochs, found.bf16.epochs) == (86, 10, 6)
    assert found.ours.minutes == pytest.approx(10.5)
    assert (found.bf16.minutes, found.float32) == pytest.approx((24, 48))  # 40 steps of float32, extrapolated
    assert cpu_times.finding(measured) == (
        "86 % in 10 minutes of steps on two CPU cores; dense takes 24 (bf16) and 48 (float32)"
    )
    assert cpu_times.table(measured).splitlines()[2:] == [
        "| sparse, 99 % | 5 | 79.0 | 1 | 5.0 | 6.0 | 4.8 × | 2.4 × |",
        "| sparse, 99 % | 10 | 86.0 ± 1.4 | 2 | 10.5 | 11.5 | 4.6 × | 2.3 × |",
        "| dense, bf16 | 3 | 80.0 | 1 | 12.0 | 13.0 | 2.0 × | 1.0 × |",
        "| dense, bf16 | 6 | 86.0 | 1 | 24.0 | 25.0 | 2.0 × | 1.0 × |",
        "| dense, float32 | 6 | not scored |  | 48.0 |  |  |  |",
    ]
    assert "Dense float32 was stopped after some steps" in cpu_times.explanation(measured)


def test_a_lower_target_is_chosen_if_one_side_does_not_reach_it(file: Path) -> None:
    found = cpu_times.compare(read(file, run("sparse, 10", 0.86, 60), run("bf16, 3", 0.8149, 240)))
    assert found is not None
    assert found.bf16 is not None
    assert (found.target, found.bf16.epochs, found.float32) == (81, 3, None)


def test_without_dense_training_only_our_time_is_given(file: Path) -> None:
    measured = read(file, run("sparse, 10", 0.86, 60), run("float32, 6", None, 480))
    assert cpu_times.finding(measured) == "86 % in 10 minutes of steps on two CPU cores"
    assert cpu_times.table(measured).splitlines()[0].endswith("| of the whole process |")


def test_steps_of_an_epoch_are_those_of_finished_arms_if_a_line_has_none(file: Path) -> None:
    timed = {key: value for key, value in run("float32, 6", None, 480).items() if key != "steps_per_epoch"}
    measured = read(file, run("sparse, 10", 0.86, 60), timed)
    assert measured.of("float32")[0].minutes == pytest.approx(48)
    assert read(file, timed).arms == ()  # no finished arm says how many steps there are


def test_overrides_and_fewer_cores_are_left_out_and_bf16_activations_are_ours(file: Path) -> None:
    others = [
        run("sparse, 3, optimizer.lr=1", 0.9, 1),
        run("sparse, 3", 0.9, 1, threads=1),
        run("sparse, 8, precision=bf16", 0.86, 30),
    ]
    measured = read(file, *RUNS, *others)
    assert [(arm.kind, arm.epochs) for arm in measured.of("sparse", "sparse bf16")] == [
        ("sparse", 5),
        ("sparse", 10),
        ("sparse bf16", 8),
    ]
    found = cpu_times.compare(measured)
    assert found is not None
    assert found.ours.kind == "sparse bf16"


def test_on_shared_cores_minutes_are_processor_time(file: Path) -> None:
    measured = read(file, run("sparse, 10", 0.86, 60, load_after=3.0))
    assert measured.shared
    assert measured.arms[0].minutes == pytest.approx(7.5)
    assert measured.arms[0].process == pytest.approx(11)
    assert "processor time" in cpu_times.explanation(measured)


def test_dense_training_that_was_only_timed_has_the_accuracy_of_a_gpu(file: Path) -> None:
    lines = (run("sparse, 15", 0.875, 60), run("bf16, 8", None, 240), run("float32, 8", None, 480))
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    measured = cpu_times.read(file, on_gpu({8: [87.0, 87.8], 12: [90.0]}))
    found = cpu_times.compare(measured)
    assert found is not None
    assert found.bf16 is not None
    assert (found.target, found.bf16.epochs, found.bf16.accuracies) == (87, 8, (87.0, 87.8))
    assert (found.ours.minutes, found.bf16.minutes, found.float32) == pytest.approx((15, 32, 64))
    assert "on a GPU" in cpu_times.explanation(measured)
    assert cpu_times.read(file).of("bf16")[0].accuracy is None


def test_an_accuracy_that_no_dense_training_reaches_has_no_factor(file: Path) -> None:
    measured = read(file, run("sparse, 20", 0.9, 60), run("sparse, 5", 0.86, 60), run("bf16, 6", 0.87, 240))
    assert cpu_times.table(measured).splitlines()[2:4] == [
        "| sparse, 99 % | 5 | 86.0 | 1 | 5.0 | 6.0 | 4.8 × |",
        "| sparse, 99 % | 20 | 90.0 | 1 | 20.0 | 21.0 |  |",
    ]


def test_dense_training_of_every_length_on_a_gpu_is_compared_with_by_the_time_of_a_step(file: Path) -> None:
    lines = (run("sparse, 9", 0.85, 60), run("bf16, 8", None, 240), run("float32, 8", None, 480))
    read(file, *lines)
    measured = cpu_times.read(file, on_gpu({6: [84.0], 7: [86.0, 87.0], 8: [88.0]}))
    assert [(arm.epochs, arm.minutes) for arm in measured.of("bf16")] == [(6, 24), (7, 28), (8, 32)]
    assert cpu_times.table(measured).splitlines()[2:] == [
        "| sparse, 99 % | 9 | 85.0 | 1 | 9.0 | 10.0 | 6.2 × | 3.1 × |",
        "| dense, bf16 | 7 | 86.5 ± 0.7 | 2 | 28.0 |  | 2.0 × | 1.0 × |",
        "| dense, float32 | 7 | 86.5 ± 0.7 | 2 | 56.0 |  | 1.0 × | 0.5 × |",
    ]


def test_the_published_recipe_stands_next_to_ours_with_its_accuracy_on_a_gpu(file: Path) -> None:
    lines = (*RUNS, run("published, 50, precision=bf16", None, 30))
    read(file, *lines)
    measured = cpu_times.read(file, {"published bf16": {50: [84.5, 85.5]}})
    assert cpu_times.table(measured).splitlines()[-1] == (
        "| SET-ITOP as published, 99 %, packed, bf16 activations | 50 | 85.0 ± 0.7 | 2 | 25.0 |  | 1.9 × | 1.0 × |"
    )
    found = cpu_times.compare(measured)
    assert found is not None
    assert found.ours.kind == "sparse"
    assert "Dense training and SET-ITOP were stopped" in cpu_times.explanation(measured)
