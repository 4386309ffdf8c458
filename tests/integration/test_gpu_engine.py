"""The CUDA engine on a GPU: captured and compiled steps train as eager ones do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from equipoise.training import Trainer, make_recipe
from equipoise.training.engine import CudaEngine, Engine
from equipoise.training.evaluate import Score
from step_matrix import Case, pairwise, recipe_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONV: dict[str, Any] = {
    "model": "small",
    "data": {"name": "digits", "batch": 128, "augment": {"pad": 2}},
    "optimizer": {"name": "sgd", "lr": 0.01},
    "topology": {"name": "set", "sparsity": 0.8, "every": 7},
    "schedule": {"name": "cosine"},
    "device": "cuda",
    "precision": "float32",
    "epochs": 2,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: {"plain": Score(0.0, 0.0, 0)})


def trained(recipe: dict[str, Any], engine: Engine | None) -> Trainer:
    trainer = Trainer(make_recipe(recipe | {"device": "cuda"}), engine=engine)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="steps run in eager mode")
        while trainer.epoch < trainer.recipe.epochs:
            trainer.run_epoch()
    return trainer


def captured(compile: bool = False) -> CudaEngine:
    return CudaEngine(torch.device("cuda"), compile=compile)


def distance(first: Trainer, second: Trainer) -> float:
    """Distance of the weights, relative to how far training has moved them."""
    start = Trainer(first.recipe).parts.model.state_dict()
    one, two = first.parts.model.state_dict(), second.parts.model.state_dict()
    names = [name for name, value in one.items() if value.is_floating_point()]
    apart = sum(float((one[name] - two[name]).square().sum()) for name in names)
    moved = sum(float((one[name] - start[name]).square().sum()) for name in names)
    return (apart / moved) ** 0.5


def assert_alike(first: Trainer, second: Trainer, tolerance: float) -> None:
    assert distance(first, second) < tolerance
    one, two = first.history[-1], second.history[-1]
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=tolerance)
    for key in ("step", "density", "updates", "passes", "learning_rate"):
        assert one[key] == two[key], key
    masks = zip(first.parts.topology.masks.values(), second.parts.topology.masks.values(), strict=True)
    # A mask may differ in weights whose scores are equal up to rounding.
    assert sum(int((a != b).sum()) for a, b in masks) <= 0.02 * first.parts.topology.size


@pytest.mark.parametrize("case", pairwise(), ids=", ".join)
def test_captured_steps_train_as_eager_ones_do(case: Case) -> None:
    recipe = recipe_of(case)
    assert_alike(trained(recipe, Engine()), trained(recipe, captured()), 0.03)


COMPILED: list[Case] = [
    ("rigl", "replay", "sgd", "standard"),
    ("bsr-net", "sgd", "sgdw", "standard"),
    ("set", "recompute", "adam", "at"),
    ("static", "sgd", "two groups", "at with clean images"),
]


@pytest.mark.parametrize("case", COMPILED, ids=", ".join)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_compiled_steps_train_as_eager_ones_do(case: Case, precision: str) -> None:
    recipe = recipe_of(case) | {"precision": precision}
    tolerance = 0.03 if precision == "float32" else 0.3
    assert_alike(trained(recipe, Engine()), trained(recipe, captured(compile=True)), tolerance)


def test_a_convolutional_network_trains_alike() -> None:
    assert_alike(trained(CONV, Engine()), trained(CONV, captured(compile=True)), 0.03)


def test_startup_is_counted_once_and_apart_from_training() -> None:
    trainer = trained(CONV | {"epochs": 4}, None)
    startup, seconds = ([line[key] for line in trainer.history] for key in ("startup_seconds", "seconds"))
    assert startup[0] > 0
    assert startup[2] == startup[3]
    assert all(after > before for before, after in zip([0.0, *seconds], seconds, strict=False))


def test_bsr_net_keeps_its_budget_and_its_signs() -> None:
    topology = {"name": "bsr-net", "sparsity": 0.9, "distribution": "uniform"}
    trainer = Trainer(make_recipe(CONV | {"topology": topology, "optimizer": "sgdw"}), engine=captured(compile=True))
    layers = trainer.parts.topology.layers
    budget = sum(layer.final for layer in layers)
    trainer.parts.model.train()
    for _ in range(8):
        trainer.take_step()
        assert sum(int(layer.mask().sum()) for layer in layers) == budget
        for layer in layers:
            assert layer.memory is not None
            weight, mask = layer.parameter.detach(), layer.mask()
            assert (weight[~mask] == 0).all()
            assert (weight[mask] * layer.memory[mask] > 0).all()


def test_a_captured_run_continues_from_a_checkpoint() -> None:
    recipe = CONV | {"correction": {"name": "agent", "mode": "replay"}}
    whole = trained(recipe, captured())
    first = Trainer(make_recipe(recipe), engine=captured())
    first.run_epoch()
    second = Trainer(make_recipe(recipe), engine=captured())
    second.load_state_dict(first.state_dict())
    second.run_epoch()
    assert distance(whole, second) < 1e-3


def test_a_run_that_cannot_be_captured_continues_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(CudaEngine, "_recorded", fail)
    trainer = Trainer(make_recipe(CONV | {"epochs": 1}))
    with pytest.warns(UserWarning, match="eager mode"):
        trainer.run_epoch()
    assert not trainer.parts.engine.captures
    assert trainer.history[-1]["step"] == len(trainer.parts.train)
