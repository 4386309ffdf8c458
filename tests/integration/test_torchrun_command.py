"""The command line under torchrun: one folder, one process that prints, the same numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed_helpers import free_port
from equipoise.training import Trainer, make_recipe
from equipoise.training.processes import own_device
from train_helpers import assert_same_runs, tiny, without_times


def torchrun(*words: str | Path, processes: int = 2, status: int = 0) -> str:
    """Run a command under torchrun and return its output."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += [f"--master-port={free_port()}", "-m", "equipoise", *map(str, words)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode == 0) == (status == 0), found.stdout + found.stderr
    return found.stdout + found.stderr


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    changes: dict[str, Any] = {
        "topology": {"name": "rigl", "sparsity": 0.8, "every": 4, "until": 1.0},
        "correction": "agent",
        "device": "cpu",
        "data": {"name": "digits", "batch": 240},
        "storage": "masked",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny(**changes)))
    return path


def test_train_under_torchrun(tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"
    said = torchrun("train", recipe, "--out", run)
    assert said.count("epoch 2/2") == 1  # one process prints
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    one = Trainer(make_recipe(yaml.safe_load(recipe.read_text())))
    result = one.run()
    assert [line["epoch"] for line in lines] == [1, 2]
    for ours, theirs in zip(lines, one.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["images_per_second"] > 0
    written = json.loads((run / "result.json").read_text())
    assert written["test"]["plain"]["images"] == 360
    assert written["test"]["plain"]["loss"] == pytest.approx(result["test"]["plain"]["loss"], rel=1e-5)
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "checkpoints", "metrics.jsonl", "recipe.yaml", "result.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_is_resumed_and_judged_by_torchrun(tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"
    torchrun("train", recipe, "--out", run, "epochs=3", "checkpoint.every=1")
    finished = lines_of(run)
    assert "is finished" in torchrun("resume", run)
    said = torchrun("eval", run, "--attack", "fgsm", "--images", "101")
    assert said.count("fgsm within") == 1
    assert re.search(r"plain .*\b101\b", said)
    (run / "result.json").unlink()
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    newest.unlink()
    torchrun("resume", run)
    assert lines_of(run) == finished


@pytest.mark.slow
def test_what_cannot_be_done_by_several_processes_is_said(tmp_path: Path, recipe: Path) -> None:
    said = torchrun("train", recipe, "--out", tmp_path / "run", "--measure", "1", status=2)
    assert "equipoise: --measure needs a single process" in said
    assert not (tmp_path / "run").exists()
    said = torchrun("train", recipe, "device=cuda:1", status=2)
    assert "equipoise: device=cuda:1: several processes use one GPU each" in said


def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(own_device("auto")) == "cuda:3"
    assert str(own_device("cpu")) == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(Exception, match="5 processes and 4 GPUs"):
        own_device("cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert str(own_device("auto")) == "cpu"


@pytest.mark.slow
def test_torchrun_brings_a_job_back_after_a_process_was_killed(tmp_path: Path, recipe: Path) -> None:
    """--max-restarts starts the same command again; it resumes the run, which ends bit-identical."""
    words = ["epochs=20", "checkpoint.steps=5", "checkpoint.keep=200", "storage=masked"]
    torchrun("train", recipe, "--out", tmp_path / "whole", *words)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    command += [f"--master-port={free_port()}", "-m", "equipoise", "train", str(recipe)]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed"), *words], stderr=subprocess.PIPE, text=True
    ) as agent:
        saved = tmp_path / "killed/checkpoints"
        assert eventually(lambda: len(list(saved.glob("step-*"))) >= 3)
        os.kill(children(agent.pid)[1], signal.SIGKILL)
        _, said = agent.communicate(timeout=120)
    assert agent.returncode == 0, said
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")


def children(process: int) -> list[int]:
    files = Path(f"/proc/{process}/task").glob("*/children")
    return sorted(int(word) for file in files for word in file.read_text().split())


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
