"""Steps of several processes that are recorded and replayed are the eager ones, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from distributed_helpers import Processes, found, processes
from equipoise.objectives import attack
from equipoise.training import Trainer, make_recipe
from equipoise.training.engine import Engine
from equipoise.training.evaluate import Score
from equipoise.training.parts import obstacle
from equipoise.training.sync_batchnorm import synchronise
from equipoise.world import World
from replay_engine import FixedAddressEngine, ReplayEngine
from step_matrix import Case, recipe_of
from train_helpers import tiny

# An epoch has batches of 719 and 718 images; the second process has 359 of both, with different shares of the loss.
DATA = {"data": {"name": "digits", "batch": 719, "augment": {"pad": 2}}, "epochs": 4, "device": "cpu"}
CASES: list[Case] = [
    ("static", "sgd", "sgd", "standard"),
    ("rigl", "replay", "adam", "standard"),
    ("set", "recompute", "sgdw", "at"),
    ("bsr-net", "sgd", "adamw, two groups", "trades"),
]
ENGINES: dict[str, type[Engine]] = {"eager": Engine, "fixed": FixedAddressEngine, "replay": ReplayEngine}


class Capturable(World):
    """Processes whose collectives count as those of nccl, so that a step is run at once."""

    capturable = True


class NotCapturable(World):
    capturable = False


@pytest.fixture
def two() -> Processes:
    return processes(2)


def train(world: World, case: Case, engine: str, capturable: bool) -> dict[str, Any]:
    """Train without scores and checks of values, which belong to no step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda *_: {"plain": Score(0.0, 0.0, 0)})
        patch.setattr(attack, "check_pixels", lambda x: None)
        own = (Capturable if capturable else World)(world.rank, world.size, world.device)
        chosen = ENGINES[engine]()
        trainer = Trainer(make_recipe(recipe_of(case) | DATA), engine=chosen, world=own)
        while trainer.epoch < trainer.recipe.epochs:
            trainer.run_epoch()
    ema = trainer.parts.ema
    assert ema is not None
    return found(trainer) | {"ema": ema.values, "replays": getattr(chosen, "replays", None)}


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        for part in ("model", "masks", "ema"):
            assert all(np.array_equal(value, theirs[part][name]) for name, value in mine[part].items())
        for key in ("steps", "updates", "refreshes"):
            assert mine[key] == theirs[key]
        losses = [[line["train_loss"] for line in run["history"]] for run in (mine, theirs)]
        assert losses[0] == losses[1]


QUICK = [case if case[3] == "standard" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", QUICK, ids=", ".join)
def test_gradients_are_averaged_between_replayed_parts(two: Processes, case: Case) -> None:
    replayed = two(train, case, "replay", False)
    assert replayed[0]["replays"] > 0
    assert_same(replayed, two(train, case, "fixed", False))


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_step_that_is_run_at_once_averages_its_gradients(two: Processes, case: Case) -> None:
    assert_same(two(train, case, "fixed", True), two(train, case, "fixed", False))


@pytest.mark.parametrize("case", QUICK, ids=", ".join)
def test_an_all_reduce_is_replayed_inside_a_step(two: Processes, case: Case) -> None:
    replayed = two(train, case, "replay", True)
    assert replayed[0]["replays"] > 0
    assert_same(replayed, two(train, case, "fixed", True))


def test_batchnorm_is_captured_over_nccl_only() -> None:
    recipe = make_recipe(tiny())
    trainer = Trainer(recipe)
    gloo, nccl = NotCapturable(0, 2), Capturable(0, 2)
    plain, normed = nn.Linear(3, 2), synchronise(nn.Sequential(nn.BatchNorm1d(3)), gloo)
    for model, world, reason in ((plain, gloo, ""), (normed, nccl, ""), (normed, gloo, "BatchNorm communicates")):
        assert reason in (found := obstacle(recipe, model, trainer.parts.train, world))
        assert bool(found) == bool(reason)
