"""Several processes on a GPU: captured steps average their gradients, inside the graphs or between them.

The file is also the program that torchrun starts: each process trains a recipe and the first one compares it with an
eager run of a single process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed_helpers import counted_collectives
from equipoise.training import Trainer, make_recipe
from equipoise.training.engine import Engine
from equipoise.training.evaluate import Score
from equipoise.world import ALONE, World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BASE: dict[str, Any] = {
    "optimizer": {"name": "sgd", "lr": 0.01},
    "schedule": {"name": "cosine"},
    "storage": "masked",
    "precision": "float32",
    "epochs": 4,
}
DATA = {"name": "digits", "batch": 120, "augment": {"pad": 2}}  # 12 batches, the last of 117 images
MLP = {"name": "mlp", "hidden": 32}
RECIPES: dict[str, dict[str, Any]] = {
    "static": {"model": MLP, "data": DATA, "topology": {"name": "static", "sparsity": 0.8}},
    "rigl, agent": {
        "model": MLP,
        "data": DATA,
        "topology": {"name": "rigl", "sparsity": 0.8, "every": 7},
        "correction": {"name": "agent", "mode": "replay"},
    },
    "bsr-net, at": {
        "model": MLP,
        "data": DATA,
        "topology": {"name": "bsr-net", "sparsity": 0.8, "distribution": "uniform"},
        "objective": {"name": "at", "steps": 2},
    },
    "batchnorm": {"model": "small", "data": DATA, "topology": {"name": "set", "sparsity": 0.8, "every": 7}},
}


class Joined(World):
    """Processes that communicate even if there is only one, so that the collectives run."""

    alone = False


def start(count: int, backend: str, recipe: str, folder: Path) -> dict[str, Any]:
    """Start the processes with torchrun and return the report of the first one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    program = [__file__, backend, recipe, "cuda", str(folder / "report.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *torchrun, *program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def assert_trained_as_one_process(report: dict[str, Any]) -> None:
    assert report["distance"] < 0.03
    assert report["losses"][0] == pytest.approx(report["losses"][1], rel=0.03)
    # A mask may differ in weights whose scores are equal up to rounding.
    assert report["differing"] <= 0.02 * report["size"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_nccl_is_captured_in_the_graphs(tmp_path: Path, recipe: str) -> None:
    report = start(1, "nccl", recipe, tmp_path)
    assert_trained_as_one_process(report)
    assert report["captures"]
    assert not report["warnings"]
    assert report["replays"] > report["steps"] / 2
    if recipe in ("static", "bsr-net, at"):  # two kinds of batches, each run once and recorded once; metrics
        assert report["collectives"]["all_reduce"] <= 4 + BASE["epochs"]


@pytest.mark.parametrize("recipe", ["static", "rigl, agent", "bsr-net, at"])
def test_gloo_averages_between_the_graphs(tmp_path: Path, recipe: str) -> None:
    report = start(2, "gloo", recipe, tmp_path)
    assert_trained_as_one_process(report)
    assert report["captures"]
    assert not report["warnings"]
    assert report["replays"] > report["steps"]
    assert report["collectives"]["all_reduce"] >= report["steps"]


def test_gloo_with_batchnorm_runs_in_eager_mode(tmp_path: Path) -> None:
    report = start(2, "gloo", "batchnorm", tmp_path)
    assert_trained_as_one_process(report)
    assert not report["captures"]
    assert any("BatchNorm communicates" in line for line in report["warnings"])


@pytest.mark.parametrize("algorithm", ["RigL", "SNFS"])
def test_fully_shard_over_nccl_equals_one_process(tmp_path: Path, algorithm: str) -> None:
    report = start(1, "nccl", algorithm, tmp_path)
    assert report["updates"] >= 3
    assert report["differing"] == 0
    assert report["distance"] < 1e-10


# The program


def sharded_report(algorithm: str, device: str, world: World) -> dict[str, Any]:
    """Train a sharded model and a whole one in float64; return how they compare."""
    from test_fsdp import loop  # the folder of this program is on its path

    case = (algorithm, "SGD", "before", 2, 0.1)
    several, one = (
        loop(where, *case[:2], attach, *case[3:], device) for where, attach in ((world, "before"), (ALONE, "after"))
    )
    pairs = [(several["weights"][name], value) for name, value in one["weights"].items()]
    masks = [(several["masks"][name], mask) for name, mask in one["masks"].items()]
    return {
        "distance": max(float((mine - theirs).abs().max().detach()) for mine, theirs in pairs),
        "differing": sum(int((mine != theirs).sum()) for mine, theirs in masks),
        "updates": several["updates"],
    }


def train(recipe: dict[str, Any], world: World | None, engine: Engine | None) -> Trainer:
    trainer = Trainer(make_recipe(recipe), engine=engine, **({} if world is None else {"world": world}))
    while trainer.epoch < trainer.recipe.epochs:
        trainer.run_epoch()
    return trainer


def distance(start: Trainer, first: Trainer, second: Trainer) -> float:
    """Distance of the weights, relative to how far training has moved them."""
    before, one, two = (trainer.parts.model.state_dict() for trainer in (start, first, second))
    names = [name for name, value in one.items() if value.is_floating_point()]
    apart = sum(float((one[name] - two[name]).square().sum()) for name in names)
    moved = sum(float((one[name] - before[name]).square().sum()) for name in names)
    return (apart / moved) ** 0.5


def report_of(recipe: dict[str, Any], world: World) -> dict[str, Any]:
    """Train on all processes and on one; return how they compare and what the processes did."""
    replays, collectives = [0], dict[str, int]()
    replay = torch.cuda.CUDAGraph.replay

    def counting(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        replay(graph)

    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(Trainer, "evaluate", return_value={"plain": Score(0.0, 0.0, 0)}),
    ):
        warnings.simplefilter("always")
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", counting), counted_collectives(collectives):
            several = train(recipe, world, None)
        one = train(recipe, None, Engine())
        start = Trainer(make_recipe(recipe))
    masks = zip(several.parts.topology.masks.values(), one.parts.topology.masks.values(), strict=True)
    return {
        "distance": distance(start, one, several),
        "losses": [trainer.history[-1]["train_loss"] for trainer in (several, one)],
        "differing": sum(int((mine != theirs).sum()) for mine, theirs in masks),
        "size": one.parts.topology.size,
        "captures": several.parts.engine.captures,
        "replays": replays[0],
        "collectives": collectives,
        "steps": several.step,
        "warnings": [str(warning.message) for warning in caught if "eager mode" in str(warning.message)],
    }


def main(backend: str, recipe: str, device: str, path: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)  # all processes share the GPU
    dist.init_process_group(backend)
    world = Joined(dist.get_rank(), dist.get_world_size(), "cuda:0" if device == "cuda" else device)
    if recipe in RECIPES:
        report = report_of(BASE | RECIPES[recipe] | {"device": device}, world)
    else:
        report = sharded_report(recipe, device, world)
    if world.leads:
        Path(path).write_text(json.dumps(report))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # graphs outlive their process group otherwise


if __name__ == "__main__":
    main(*sys.argv[1:])
