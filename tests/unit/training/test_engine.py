"""Steps that are recorded and replayed are the eager ones, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equipoise.objectives import attack
from equipoise.training import Trainer, make_recipe
from equipoise.training.engine import Engine
from equipoise.training.evaluate import Score
from replay_engine import FixedAddressEngine, ReplayEngine
from step_matrix import ALL, BASE, Case, pairwise, recipe_of
from train_helpers import assert_same_state

SLOWER = ("pays", "alpha-svrg", "agent-mvr")  # their parts are in the other corrections too
QUICK = {*sorted(case for case in pairwise() if case[1] not in SLOWER)[::2]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither scores nor the check of an attack's input, which reads values, belong to a step."""
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: {"plain": Score(0.0, 0.0, 0)})
    monkeypatch.setattr(attack, "check_pixels", lambda x: None)


def run(raw: dict[str, Any], engine: Engine) -> Trainer:
    trainer = Trainer(make_recipe(raw), engine=engine)
    while trainer.epoch < trainer.recipe.epochs:
        trainer.run_epoch()
    return trainer


def trained(case: Case, engine: Engine) -> Trainer:
    return run(recipe_of(case) | {"device": "cpu"}, engine)


def assert_same(left: Trainer, right: Trainer) -> None:
    """Weights, masks, optimizer, average, correction, counters and random numbers."""
    states = [trainer.state_dict() for trainer in (left, right)]
    for state in states:
        for clock in ("seconds", "startup_seconds"):
            state.pop(clock)
    assert_same_state(*states)
    timed = {"seconds", "startup_seconds", "images_per_second"}
    assert [{k: v for k, v in line.items() if k not in timed} for line in left.history] == [
        {k: v for k, v in line.items() if k not in timed} for line in right.history
    ]


def replayed_as_eager(raw: dict[str, Any]) -> Trainer:
    """Train a recipe with replayed steps and with eager ones, compare the two runs, and return the second."""
    eager, engine = run(raw, FixedAddressEngine()), ReplayEngine()
    assert_same(run(raw, engine), eager)
    assert engine.replays > 0
    return eager


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ALL], ids=", ".join
)
def test_replayed_steps_are_eager_steps(case: Case) -> None:
    replayed_as_eager(recipe_of(case) | {"device": "cpu"})


@pytest.mark.parametrize("correction", ["sgd", "agent"])
def test_sr_ste_is_replayed(correction: str) -> None:
    """The masks change inside the recorded functions."""
    chosen = {"topology": {"name": "sr-ste"}, "optimizer": {"name": "sgd", "lr": 0.05}, "device": "cpu"}
    eager = replayed_as_eager(BASE | chosen | {"correction": correction, "epochs": 3})
    assert eager.parts.topology.exploration > 0.5


def test_hydra_is_replayed() -> None:
    """Recorded steps before and after those that learn scores, which are taken eagerly."""
    topology = {"name": "hydra", "sparsity": 0.8, "begin": 0.4, "until": 0.7}
    chosen = {"topology": topology, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "device": "cpu"}
    eager = replayed_as_eager(BASE | chosen | {"epochs": 5})
    assert eager.parts.topology.updates > 0
    assert eager.parts.topology.density == pytest.approx(0.2, abs=0.01)
    assert all((la.parameter.detach()[~la.mask()] == 0).all() for la in eager.parts.topology.layers)


def test_a_smaller_last_batch_is_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASE, "data", {**BASE["data"], "batch": 500})
    case = ("set", "recompute", "adam", "trades")
    assert_same(trained(case, ReplayEngine()), trained(case, FixedAddressEngine()))


def test_bsr_net_rewires_every_fourth_step_with_adam_too() -> None:
    for engine in (Engine(), ReplayEngine()):
        trainer = trained(("bsr-net every 4", "sgd", "adam", "standard"), engine)
        assert (trainer.step, trainer.parts.topology.updates) == (6, 1)


@pytest.mark.parametrize("optimizer", ["sgd", "sgdw", "adam"])
def test_the_noise_of_bsr_net_is_in_units_of_the_learning_rate(optimizer: str) -> None:
    """Also with Adam, whose bias correction must not scale it."""
    recipe = recipe_of(("bsr-net", "sgd", optimizer, "standard")) | {"device": "cpu", "epochs": 1}
    moved = []
    for noise in (0.0, 1e-2):
        recipe = recipe | {"topology": {**recipe["topology"], "noise": noise, "rewire_every": 100}}
        trainer = Trainer(make_recipe(recipe))
        trainer.parts.model.train()
        trainer.take_step()
        moved.append([layer.parameter.detach().clone() for layer in trainer.parts.topology.layers])
    kept = torch.cat([(b - a)[(a != 0) & (b != 0)] for a, b in zip(*moved, strict=True)])
    assert float(kept.std()) == pytest.approx(1e-2 * trainer.learning_rate, rel=0.2)
