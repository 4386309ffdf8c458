"""A run that is killed with kill -9 and resumed ends bit-identical to one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from equipoise.training.checkpoint import Store
from killing import Trap, launch
from train_helpers import assert_same_runs, tiny

EVERYWHERE: list[Trap] = [
    ("after a step", 4),
    ("within a step", 7),
    ("after half a checkpoint", 1),
    ("before a checkpoint has its name", 1),
    ("after a line", 1),
    ("before old checkpoints are gone", 1),
    ("before the result", 1),
]


def kill_and_compare(tmp_path: Path, traps: list[Trap], **changes: Any) -> str:
    """Kill a run at each moment, resume it, compare it with an undisturbed run, and return its log."""
    recipe, log = tmp_path / "recipe.yaml", tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    recipe.write_text(yaml.safe_dump(tiny(**changes)))
    assert launch(["train", str(recipe), "--out", str(whole)], log) == 0, log.read_text()
    command = ["train", str(recipe), "--out", str(killed)]
    for trap in traps:
        assert launch(command, log, trap) == -signal.SIGKILL, f"{trap}: {log.read_text()}"
        command = ["resume", str(killed)]
    assert launch(command, log) == 0, log.read_text()
    assert_same_runs(whole, killed)
    assert not [path for path in killed.rglob("*") if path.name.endswith(".tmp")]
    return log.read_text()


CASES: dict[str, dict[str, Any]] = {
    "set, agent, average, checkpoints within epochs": {
        "correction": "agent",
        "checkpoint": {"steps": 4},
    },
    "rigl, agent by replay with a coefficient per layer, adam": {
        "topology": {"name": "rigl", "sparsity": 0.7, "every": 3},
        "correction": {
            "name": "agent",
            "mode": "replay",
            "coefficient": {"name": "gradient", "per_layer": True},
            "gamma": 1,
        },
        "optimizer": {"name": "adam", "lr": 0.005},
        "checkpoint": {"steps": 5, "keep": 1},
    },
    "snfs, mvr, clipped, cosine": {
        "topology": {"name": "snfs", "sparsity": 0.7, "every": 3},
        "correction": "mvr",
        "schedule": {"name": "cosine", "warmup": 1},
        "clip": 0.5,
        "checkpoint": {"steps": 1, "keep": 3},
    },
    "granet, saga, adamw, augmented": {
        "topology": {"name": "granet", "sparsity": 0.7, "every": 2},
        "correction": "saga",
        "optimizer": {"name": "adamw", "lr": 0.005, "decay_all": False},
        "data": {"name": "digits", "batch": 240, "augment": {"pad": 1, "flip": False}, "validation": 200},
        "checkpoint": {"steps": 7},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_at_many_moments_ends_bit_equal(case: str, tmp_path: Path) -> None:
    kill_and_compare(tmp_path, EVERYWHERE, **{"epochs": 5, **CASES[case]})


MORE: dict[str, dict[str, Any]] = {
    "bsr-net, running, sgdw, no average": {
        "topology": {"name": "bsr-net", "sparsity": 0.7, "distribution": "erk"},
        "correction": {"name": "agent", "mode": "running"},
        "optimizer": {"name": "sgdw", "lr": 0.02},
        "ema": 0,
        "checkpoint": {"steps": 2},
    },
    "mest, replay across epochs, bf16": {
        "topology": {"name": "mest", "sparsity": 0.7, "every": 2},
        "correction": {"name": "svrg", "mode": "replay", "every": 4},
        "precision": "bf16",
        "checkpoint": {"steps": 3},
    },
    "rigl-itop, adversarial, svrg": {
        "topology": {"name": "rigl-itop", "sparsity": 0.7, "every": 3},
        "objective": {"name": "at", "steps": 2, "eps": 0.1, "step_size": 0.05},
        "correction": {"name": "svrg"},
        "checkpoint": {"steps": 5},
    },
    "convolutions with BatchNorm, gmp, agent-mvr": {
        "model": "small",
        "data": {"name": "digits", "batch": 60, "validation": 1257},
        "topology": {"name": "gmp", "sparsity": 0.7, "every": 1},
        "correction": "agent-mvr",
        "epochs": 2,
        "checkpoint": {"steps": 1},
    },
}


@pytest.mark.parametrize("case", MORE)
def test_a_run_killed_twice_ends_bit_equal(case: str, tmp_path: Path) -> None:
    traps = [("after a step", 3), ("before a checkpoint has its name", 3)]
    kill_and_compare(tmp_path, traps, **{"epochs": 3, **MORE[case]})


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, [("after a step", 1), ("after a refresh", 1), ("after a line", 1)], correction="svrg")


@pytest.mark.parametrize("trap", [("before a file has its second name", 2), ("before old checkpoints are gone", 2)])
def test_a_run_killed_within_its_last_checkpoint_ends_bit_equal(tmp_path: Path, trap: Trap) -> None:
    """The last checkpoint is the best: it was not kept as the best, and the one before it was not removed."""
    kill_and_compare(tmp_path, [trap], epochs=1, checkpoint={"steps": 4, "keep": 1})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "replay", "running"])
@pytest.mark.parametrize("correction", ["agent", "svrg", "alpha-svrg", "fixed"])
@pytest.mark.parametrize("topology", ["static", "set", "rigl", "snfs", "mest", "gmp", "granet"])
def test_every_topology_with_every_correction(topology: str, correction: str, mode: str, tmp_path: Path) -> None:
    moving = {} if topology == "static" else {"every": 2}
    kill_and_compare(
        tmp_path,
        [("after a step", 4), ("after a refresh", 1), ("within a step", 5)],
        epochs=3,
        topology={"name": topology, "sparsity": 0.8, **moving},
        correction={"name": correction, "mode": mode},
        checkpoint={"steps": 3},
    )


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["mvr", "agent-mvr", "saga"])
@pytest.mark.parametrize("topology", ["static", "set", "rigl", "snfs", "mest", "gmp", "granet"])
def test_every_topology_with_recursions_and_tables(topology: str, correction: str, tmp_path: Path) -> None:
    moving = {} if topology == "static" else {"every": 2}
    kill_and_compare(
        tmp_path,
        [("after a step", 4), ("within a step", 5)],
        epochs=3,
        topology={"name": topology, "sparsity": 0.8, **moving},
        correction=correction,
        optimizer={"name": "adam", "lr": 0.005},
        checkpoint={"steps": 5},
    )


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    recipe, log = tmp_path / "recipe.yaml", tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    recipe.write_text(yaml.safe_dump(tiny(epochs=3, checkpoint={"steps": 4})))
    assert launch(["train", str(recipe), "--out", str(whole)], log) == 0
    assert launch(["train", str(recipe), "--out", str(killed)], log, ("after a step", 11)) == -signal.SIGKILL
    newest = Store(killed / "checkpoints").paths()[0]
    os.truncate(newest, newest.stat().st_size // 2)
    assert launch(["resume", str(killed)], log) == 0
    warnings = [line for line in log.read_text().splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"equipoise: warning: {newest} is damaged")
    assert warnings[0].endswith("using the one before it")
    assert_same_runs(whole, killed)


def test_a_run_killed_from_outside_by_its_process_id(tmp_path: Path) -> None:
    """As by a scheduler: kill -9 at a random moment."""
    recipe, log = tmp_path / "recipe.yaml", tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    recipe.write_text(yaml.safe_dump(tiny(epochs=25, checkpoint={"steps": 4})))
    command = [sys.executable, "-m", "equipoise", "train", str(recipe), "--out", str(killed)]
    with open(log, "a") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        deadline = time.monotonic() + 100
        while not (killed / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL, log.read_text()
    assert not (killed / "result.json").exists()
    assert launch(["resume", str(killed)], log) == 0, log.read_text()
    assert launch(["train", str(recipe), "--out", str(whole)], log) == 0
    assert_same_runs(whole, killed)
