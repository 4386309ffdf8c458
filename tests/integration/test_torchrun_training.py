"""Several processes train as one does: every topology, correction, objective and storage."""

from __future__ import annotations

import signal
import warnings
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from distributed_helpers import (
    Processes,
    alone,
    assert_equal_runs,
    counted_collectives,
    double_trainer,
    found,
    processes,
    train,
    train_and_resume,
    train_normed,
)
from equipoise.errors import UserError
from equipoise.studies.robust import robust_table
from equipoise.training import RunFolder, Trainer, make_recipe, resume, signals
from equipoise.training.watchers import Watcher
from equipoise.world import ALONE, World
from train_helpers import tiny


@pytest.fixture
def two() -> Processes:
    return processes(2)


def topology(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "sparsity": 0.8, **options}


# Nine epochs of six batches, the last of which is of an odd number of images; topology updates every 7 steps.
LONG = {"epochs": 9, "ema": 0.9}
RIGL = topology("rigl", every=7, until=1.0)

CASES: dict[str, dict[str, Any]] = {
    "rigl, agent by replay": {"topology": RIGL, "correction": "agent"},
    "rigl, agent by recomputing, clipped": {
        "topology": RIGL,
        "correction": {"name": "agent", "mode": "recompute"},
        "clip": 0.5,
    },
    "corrected growth, gradient coefficient": {
        "topology": topology("rigl", every=7, until=1.0, growth="corrected", step_at_update="take"),
        "correction": {"name": "agent", "coefficient": "gradient", "mode": "recompute"},
    },
    "snfs, running, by layer": {
        "topology": topology("snfs", every=7),
        "correction": {"name": "agent", "mode": "running", "coefficient": {"name": "gradient", "per_layer": True}},
    },
    "mest, when it pays": {
        "topology": topology("mest", every=7),
        "correction": {"name": "agent", "when": "pays", "probe": 3, "every": 5},
    },
    "bsr-net, svrg": {"topology": topology("bsr-net", distribution="erk"), "correction": "svrg"},
    "granet, mvr": {"topology": topology("granet", every=7), "correction": "mvr"},
    "set, saga": {"topology": topology("set", every=7), "correction": "saga"},
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one_over_54_steps_in_float64(two: Processes, case: str) -> None:
    changes = LONG | CASES[case]
    several, one = two(train, changes), alone(changes)
    assert one["steps"] == 54
    assert one["updates"] >= 5
    assert_equal_runs(several, one, 1e-10)
    for ours, theirs in zip(several[0]["history"], one["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9)
        assert ours["train_accuracy"] == theirs["train_accuracy"]
        assert ours["correction"] == pytest.approx(theirs["correction"], rel=1e-6, abs=1e-9)
        for way, score in theirs["scores"].items():
            assert ours["scores"][way] == pytest.approx(score, rel=1e-5)


SHORT = {"epochs": 2, "ema": 0}

MORE: dict[str, dict[str, Any]] = {
    f"{name}, {correction}": {
        "topology": topology(name, **({} if name in ("static", "bsr-net") else {"every": 3}))
        | ({"distribution": "erk"} if name == "bsr-net" else {}),
        "correction": correction,
    }
    for name in ("static", "set", "rigl", "snfs", "mest", "gmp", "granet", "bsr-net")
    for correction in ("sgd", "agent", "svrg", "alpha-svrg", "mvr", "agent-mvr", "saga")
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_every_topology_with_every_correction(two: Processes, case: str) -> None:
    changes = {"epochs": 3, "ema": 0, **MORE[case]}
    assert_equal_runs(two(train, changes), alone(changes), 1e-10)


OBJECTIVES: dict[str, Any] = {
    "at": {"name": "at", "steps": 2},
    "trades": {"name": "trades", "steps": 2},
    "mart": {"name": "mart", "steps": 2, "norm": "l2", "eps": 0.5},
    "mixed": {"name": "mixed", "steps": 2},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_attacks_the_images_as_one_process_would(two: Processes, objective: str) -> None:
    changes = {
        "objective": OBJECTIVES[objective],
        "topology": RIGL,
        "correction": "agent",
        "data": {"name": "digits", "batch": 240, "drop_last": objective == "mixed"},
        "epochs": 2,
    }
    assert_equal_runs(two(train, changes), alone(changes), 1e-10)


def test_synchronised_batchnorm_equals_one_process_in_float64(two: Processes) -> None:
    changes = {
        "model": "normed",
        "data": {"name": "digits", "batch": 28},  # 52 steps, the last on 9 images
        "topology": topology("rigl", every=11, until=1.0),
        "correction": {"name": "agent", "every": 20},
        "epochs": 1,
        "storage": "masked",
    }
    several, one = two(train_normed, changes), train_normed(ALONE, changes)
    assert one["steps"] == 52
    assert one["refreshes"] == 3
    assert_equal_runs(several, one, 1e-10)
    for way in ("plain", "bn_recalibrated", "ema"):
        assert several[0]["test"][way]["loss"] == pytest.approx(one["test"][way]["loss"], rel=1e-6)


PACKED: dict[str, dict[str, Any]] = {
    "rigl, agent": {"topology": topology("rigl", every=3, until=1.0), "correction": "agent"},
    "snfs, recompute": {
        "topology": topology("snfs", every=3),
        "correction": {"name": "agent", "mode": "recompute", "coefficient": "gradient"},
    },
    "bsr-net, mvr": {
        "topology": topology("bsr-net", distribution="erk"),
        "correction": "mvr",
        "optimizer": {"name": "sgd", "lr": 0.5},
    },
    "batchnorm": {
        "model": "small",
        "data": {"name": "digits", "batch": 359, "drop_last": True},
        "topology": topology("rigl", every=3, until=1.0),
        "epochs": 1,
    },
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_storage_equals_one_process_to_rounding(two: Processes, case: str) -> None:
    changes = {**SHORT, "storage": "packed", **PACKED[case]}
    several, one = two(train, changes, False), alone(changes, False)
    assert several[0]["storage"] == "packed"
    assert one["updates"] >= 1
    assert_equal_runs(several, one, 1e-4)


def test_float32_equals_one_process_to_rounding(two: Processes) -> None:
    changes = {**SHORT, "topology": topology("rigl", every=4, until=1.0), "correction": "agent", "storage": "masked"}
    assert_equal_runs(two(train, changes, False), alone(changes, False), 1e-5)


# Masks


def spoil_a_mask(world: World, storage: str) -> str:
    """The message with which a run stops whose second process has another mask."""
    trainer = Trainer(make_recipe(tiny(storage=storage, topology=topology("set", every=4))), world=world)
    layer = trainer.parts.topology.layers[1]
    if world.rank == 1:
        active, inactive = (layer.mask().reshape(-1) == state for state in (True, False))
        layer.rewire(active.nonzero()[0], inactive.nonzero()[0], [])
    try:
        trainer.run()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("storage", ["masked", "packed"])
def test_differing_masks_stop_the_run_and_name_the_layer(two: Processes, storage: str) -> None:
    messages = two(spoil_a_mask, storage)
    assert messages[0] == messages[1]
    assert '"layers.2.weight"' in messages[0]
    assert "processes 0 and 1" in messages[0]


def collectives_of_a_step(world: World, changes: dict[str, Any]) -> dict[str, int]:
    """What is said between the processes in one ordinary step."""
    trainer = double_trainer(world, {**changes, "ema": 0})
    trainer.parts.model.train()
    counts: dict[str, int] = {}
    for step in range(3):
        with counted_collectives(counts if step == 2 else {}):
            trainer.take_step()
    return counts


@pytest.mark.parametrize(
    "changes",
    [
        {"topology": topology("bsr-net", distribution="erk")},
        {"topology": topology("rigl"), "correction": "agent"},
        {"topology": topology("snfs"), "correction": {"name": "agent", "mode": "running", "coefficient": "gradient"}},
    ],
    ids=["bsr-net rewiring", "agent", "gradient coefficient"],
)
def test_a_step_costs_one_all_reduce(two: Processes, changes: dict[str, Any]) -> None:
    assert two(collectives_of_a_step, changes) == [{"all_reduce": 1}] * 2


# Going on


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({"topology": RIGL, "correction": "agent"}, 9),
        ({"topology": RIGL, "correction": {"name": "agent", "mode": "running"}, "storage": "packed"}, 8),
        ({"topology": topology("bsr-net", distribution="erk"), "correction": "saga"}, 9),
    ],
    ids=["replay", "running, packed", "saga"],
)
def test_a_resumed_run_is_bit_equal(two: Processes, tmp_path: Path, changes: dict[str, Any], after: int) -> None:
    for whole, resumed in two(train_and_resume, str(tmp_path), {"epochs": 3, **changes}, after):
        for part in ("model", "masks"):
            assert all(np.array_equal(value, resumed[part][name]) for name, value in whole[part].items())
        assert all(np.array_equal(a, b) for a, b in zip(whole["momentum"], resumed["momentum"], strict=True))
        assert np.array_equal(whole["random"], resumed["random"])
        times = ("seconds", "images_per_second")
        lines = [[{k: v for k, v in x.items() if k not in times} for x in run["history"]] for run in (whole, resumed)]
        assert lines[0][-len(lines[1]) :] == lines[1]


def break_off(world: World, folder: str, changes: dict[str, Any]) -> None:
    recipe = make_recipe(tiny(**changes, checkpoint={"steps": 8, "keep": 100}))
    own = RunFolder.create(Path(folder), recipe.raw, 100) if world.leads else None
    Trainer(recipe, own, world=world).run()
    for file in Path(folder).glob("checkpoints/*") if world.leads else ():
        if file.name != "step-000000008.safetensors":
            file.unlink()


def test_another_number_of_processes_goes_on_with_the_same_gradients(two: Processes, tmp_path: Path) -> None:
    """The shares of old gradients are averaged: one process goes on from the middle of two's epoch."""
    changes = {"topology": RIGL, "correction": "agent", "epochs": 3, "storage": "masked"}
    two(break_off, str(tmp_path / "run"), changes)
    resumed = resume(RunFolder(tmp_path / "run"), make_recipe(tiny(**changes)))
    assert resumed.step == 8
    resumed.run()
    whole = alone(changes, False)
    assert_equal_runs([found(resumed)], whole, 1e-5)
    for ours, theirs in zip(resumed.history[1:], whole["history"][1:], strict=True):
        assert ours["train_accuracy"] == pytest.approx(theirs["train_accuracy"])
        assert ours["images_per_second"] > 0


class Asking(Watcher):
    """Asks its process to stop after the first step."""

    def step(self, trainer: Trainer) -> None:
        if trainer.step == 1:
            signal.raise_signal(signal.SIGTERM)


def stop_by_the_second(world: World) -> int:
    """How far each process comes when a signal asks only the second one to stop, after the first step."""
    own = World(world.rank, world.size, world.device)  # its flag stays raised
    trainer = Trainer(make_recipe(tiny()), watcher=Asking() if world.rank == 1 else None, world=own)
    with pytest.raises(SystemExit), signals.stoppable("equipoise resume"):
        trainer.run()
    return trainer.step


def test_all_processes_stop_at_the_same_step(two: Processes) -> None:
    assert two(stop_by_the_second) == [2, 2]


def attacked(world: World, images: int) -> tuple[list[list[str]], dict[str, Any]]:
    """The robust table of a model that has not been trained, and its clean scores."""
    trainer = Trainer(make_recipe(tiny()), world=world)
    console = Console(file=StringIO(), width=120)
    console.print(robust_table(trainer, "test", "fgsm", None, images, "", console))
    words = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    scores = {way: asdict(score) for way, score in trainer.evaluate("test").items()}
    return [line for line in words if line and line[-1].isdecimal()], scores


@pytest.mark.filterwarnings("ignore::equipoise.objectives.GradientMaskingWarning")
@pytest.mark.parametrize("images", [0, 101])
def test_evaluation_and_robust_evaluation_are_those_of_one_process(two: Processes, images: int) -> None:
    """FGSM starts from the images themselves, so that nothing is random."""
    first, second = two(attacked, images)
    table, scores = attacked(ALONE, images)
    assert first == second == [table, first[1]]
    assert {line[-1] for line in table} == {str(images or 360)}
    for way, score in scores.items():
        assert first[1][way] == pytest.approx(score, rel=1e-6)


def roll_back(world: World, folder: str) -> tuple[int, float, dict[str, Any]]:
    """A run whose learning rate is far too high, allowed to go back twice."""
    changes = {"optimizer": {"name": "sgd", "lr": 1e6}, "rollback": {"times": 2, "factor": 1e-4}, "clip": 1e9}
    recipe = make_recipe(tiny(**changes, epochs=2))
    trainer = Trainer(recipe, RunFolder.create(Path(folder), recipe.raw) if world.leads else None, world=world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.run()
    return trainer.rollbacks, trainer.parts.optimizer.param_groups[0]["lr"], found(trainer)["model"]


def test_all_processes_go_back_together(two: Processes, tmp_path: Path) -> None:
    (first, rate, model), (second, _, other) = two(roll_back, str(tmp_path / "run"))
    assert first == second >= 1
    assert rate < 1e6
    assert all(np.isfinite(value).all() and np.array_equal(value, other[name]) for name, value in model.items())


def complaint(world: World, changes: dict[str, Any]) -> str:
    try:
        Trainer(make_recipe(tiny(**changes)), world=world)
    except UserError as error:
        return str(error)
    return ""


def test_batches_that_cannot_be_shared_are_refused(two: Processes) -> None:
    small = two(complaint, {"data": {"name": "digits", "batch": 1}})
    assert small == ["2 processes cannot share a batch of 1: fewer processes, or larger batches"] * 2
    last = two(complaint, {"data": {"name": "digits", "batch": 1436}})
    assert last == ["2 processes cannot share a batch of 1: set data.drop_last=true"] * 2


def test_alone_nothing_changes() -> None:
    """One process of this code takes the very tensors it is given."""
    tensors = [torch.ones(3), torch.zeros(2)]
    assert all(a is b for a, b in zip(ALONE.all_reduce_mean(tensors), tensors, strict=True))
    assert ALONE.all_gather_object(5) == [5]
    assert ALONE.broadcast_object(5) == 5
    assert not ALONE.flag
