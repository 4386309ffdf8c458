"""Everything that is killed: runs in one, two and three processes, studies, and trainings inside other frameworks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
import yaml
from safetensors.torch import load_file

import equipoise as eq
from equipoise.training import checkpoint
from harness.kills import LONGEST, PLACES, Pipeline, Subject, pipelines
from killing import Point, launch
from train_helpers import TIMES, assert_same_runs, assert_same_state

GROUPS = {2: 24, 3: 12}  # pipelines by number of processes
FRAMEWORKS = {"Lightning": "lightning", "Hugging Face Trainer": "transformers"}
HEAVY = ["lightning.pytorch", "transformers.trainer", "accelerate"]  # worth importing once for all processes
CORRECTIONS = {
    "none": None,
    "agent": eq.Agent(gamma=1.0),
    "agent, replay": eq.Agent(gamma=1.0, mode="replay", coefficient="gradient"),
    "agent, running": eq.Agent(gamma=1.0, mode="running"),
    "svrg, every 6": eq.SVRG(every=6),
}


def subjects(seed: int) -> list[Subject]:
    """List all subjects, in an order drawn from a seed. Frameworks that are not installed are left out."""
    random = Random(f"{seed} subjects")
    found: list[Subject] = [*pipelines()]
    for processes, count in GROUPS.items():
        found += random.sample(pipelines(processes), count)
    found += [Study(each) for each in random.sample(pipelines(), 12)]
    for framework, package in FRAMEWORKS.items():
        if find_spec(package) is not None:
            found += [Framework(framework, correction) for correction in CORRECTIONS]
    random.shuffle(found)
    return found


@dataclass(frozen=True)
class Study:
    """A study of a pipeline and of the same pipeline without its correction."""

    pipeline: Pipeline

    kind = "studies"
    places: ClassVar[Mapping[str, int]] = {**PLACES, "study result": 3}
    longest = 2 * LONGEST

    def __str__(self) -> str:
        return f"study of {self.pipeline}"

    def prepare(self, folder: Path, random: Random) -> None:
        self.pipeline.prepare(folder, random)
        arms = {"plain": {"correction": "sgd"}, "corrected": {}}
        study = {"title": "T", "recipe": "recipe.yaml", "seeds": [0], "arms": arms}
        (folder / "s.yaml").write_text(yaml.safe_dump(study))

    def run(self, folder: Path, name: str, random: Random, trap: Point | float | None = None) -> int:
        here = folder / name
        words = ["study", str(folder / "s.yaml"), "--results", str(here / "results"), "--work", str(here / "work")]
        return launch(words, folder / "log", trap)

    def compare(self, folder: Path, one: str, other: str) -> None:
        left, right = (_results(folder / name / "results" / "s") for name in (one, other))
        assert len(left) == 3
        assert left == right
        for run in (folder / one / "work" / "s").glob("*-seed0"):
            assert_same_runs(run, folder / other / "work" / "s" / run.name)

    def stores(self, folder: Path, name: str) -> list[Path]:
        """Those of unfinished jobs: a study does not read the others again."""
        results = folder / name / "results" / "s"
        runs = sorted((folder / name / "work" / "s").glob("*-seed0"))
        return [run / "checkpoints" for run in runs if not (results / f"{run.name}.json").exists()]


def _results(folder: Path) -> dict[str, Any]:
    """All results files, without seconds and dates."""
    return {path.name: _without_times(json.loads(path.read_text())) for path in folder.glob("*.json")}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMES | {"date"}}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Framework:
    """A training in PyTorch Lightning or in the Hugging Face Trainer, continued from the framework's checkpoints."""

    framework: str
    correction: str

    places: ClassVar[Mapping[str, int]] = {"update": 4, "refresh": 2, "framework checkpoint": 4}
    longest = 1.0

    @property
    def kind(self) -> str:
        return self.framework

    def __str__(self) -> str:
        return f"{self.framework}, {self.correction}"

    def prepare(self, folder: Path, random: Random) -> None:
        pass

    def run(self, folder: Path, name: str, random: Random, trap: Point | float | None = None) -> int:
        work = {"Lightning": _fit, "Hugging Face Trainer": _train}[self.framework]
        (folder / name).mkdir(exist_ok=True)
        return launch(partial(work, folder / name, self.correction), folder / "log", trap)

    def compare(self, folder: Path, one: str, other: str) -> None:
        state = {"Lightning": _lightning_state, "Hugging Face Trainer": _transformers_state}[self.framework]
        assert_same_state(state(folder / one), state(folder / other))

    def stores(self, folder: Path, name: str) -> list[Path]:
        return []


def _fit(folder: Path, correction: str) -> None:
    """Shuffled batches and dropout, from the checkpoint of the last epoch."""
    from lightning.pytorch import seed_everything
    from torch.utils.data import DataLoader, DistributedSampler

    from framework_helpers import BATCH, CLIP, data, network
    from lightning_helpers import Module, fit

    last = folder / "last.ckpt"
    seed_everything(0, verbose=False)
    if "replay" in correction:  # reads the batches of an epoch ahead, so their order must follow from the epoch
        loader = DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data(), num_replicas=1, rank=0))
    else:
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    fit(
        folder,
        CORRECTIONS[correction],
        module=Module(network(dropout=0.5)),
        loader=loader,
        every=0,
        resume=str(last) if last.exists() else None,
        gradient_clip_val=CLIP,
    )


def _lightning_state(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, step, and the state of equipoise in the last checkpoint."""
    held = torch.load(folder / "last.ckpt", weights_only=False)
    (ours,) = (state for name, state in held["callbacks"].items() if name.startswith("SparseTraining"))
    return {"ours": ours, **{key: held[key] for key in ("global_step", "state_dict", "optimizer_states")}}


def _train(folder: Path, correction: str) -> None:
    """A BERT with dropout and shuffled batches, from the last checkpoint that is complete."""
    from transformers_helpers import bert, sentences, train

    # the state of equipoise is the last file of a checkpoint
    complete = sorted(folder.glob("checkpoint-*/equipoise.safetensors"), key=_step)
    train(
        folder,
        CORRECTIONS[correction],
        model=bert(),
        dataset=sentences(),
        resume=str(complete[-1].parent) if complete else None,
        save_strategy="steps",
        save_steps=4,
        learning_rate=0.01,
    )


def _step(path: Path) -> int:
    return int(path.parent.name.removeprefix("checkpoint-"))


def _transformers_state(folder: Path) -> dict[str, Any]:
    last = max(folder.glob("checkpoint-*/equipoise.safetensors"), key=_step)
    return {
        "step": _step(last),
        "ours": checkpoint.load(last),
        "model": load_file(last.parent / "model.safetensors"),
        "optimizer": torch.load(last.parent / "optimizer.pt"),
    }
