"""The captured step on a GPU: the same training as eager steps, for every topology, correction and objective."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from equipoise.training.captured import CapturedStep

from equipoise.training import Trainer, make_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BASE: dict[str, Any] = {
    "model": "small",
    "data": {"name": "digits", "batch": 128, "augment": {"pad": 2}},
    "optimizer": {"name": "sgd", "lr": 0.01},
    "schedule": {"name": "cosine"},
    "device": "cuda",
    "precision": "float32",
    "epochs": 2,
}
SET: dict[str, Any] = {"name": "set", "sparsity": 0.8, "every": 7}
TOPOLOGIES = {
    "dense": "dense",
    "static": {"name": "static", "sparsity": 0.8},
    **{name: {**SET, "name": name} for name in ("set", "rigl", "rigl-itop", "mest", "snfs", "gmp", "granet")},
}
CORRECTIONS = {
    "recompute": {"name": "agent", "mode": "recompute"},
    "replay": {"name": "agent", "mode": "replay"},
    "replay-bf16": {"name": "agent", "mode": "replay", "table": "bf16"},
    "running": {"name": "agent", "mode": "running", "share": 0.5},
    "gradient": {"name": "agent", "mode": "running", "coefficient": {"name": "gradient", "per_layer": True}},
    "pays": {"name": "svrg", "when": "pays"},
    **{name: name for name in ("svrg", "alpha-svrg", "mvr", "agent-mvr", "saga", "fixed", "agent-no-gamma")},
}
OPTIMIZERS = {
    "sgdw": {"name": "sgdw", "lr": 0.01},
    "adam": {"name": "adam", "lr": 1e-4},
    "adamw": {"name": "adamw", "lr": 1e-4},
    "no decay of norms": {"name": "sgd", "lr": 0.01, "decay_all": False},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"topology {name}": {"topology": part} for name, part in TOPOLOGIES.items()},
    **{f"correction {name}": {"topology": SET, "correction": part} for name, part in CORRECTIONS.items()},
    **{f"optimizer {name}": {"topology": SET, "optimizer": part} for name, part in OPTIMIZERS.items()},
    **{
        f"objective {name} {way}": {
            "topology": SET,
            "objective": {"name": name, "steps": 2},
            "correction": "sgd" if way == "sgd" else {"name": "agent", "mode": way},
        }
        for name in ("at", "trades", "mart", "mixed")
        for way in ("sgd", "recompute", "running")
    },
    "objective at with clean images": {
        "topology": SET,
        "objective": {"name": "at", "steps": 2, "clean_fraction": 0.3},
    },
    "clipping": {"topology": SET, "clip": 0.5},
}


def trained(case: dict[str, Any], compile: bool = False, **extra: Any) -> Trainer:
    """Train to the end; compiled or not, captured unless `engine` is eager."""
    trainer = Trainer(make_recipe({**BASE, **case, **extra}))
    if trainer.recipe.engine == "auto":
        trainer.captured = CapturedStep(trainer, compile=compile)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="steps run in eager mode")
        while trainer.epoch < trainer.recipe.epochs:
            trainer._run_epoch()
    assert (trainer.captured is None) == (trainer.recipe.engine == "eager")
    return trainer


def distance(first: Trainer, second: Trainer) -> float:
    """Of the weights, relative to how far training has moved them."""
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


@pytest.mark.parametrize("name", CASES)
def test_captured_steps_train_as_eager_ones_do(name: str) -> None:
    """Float32 without TF32. A mask may differ where two scores are equal up to rounding, so not to the last bit."""
    eager, captured = trained(CASES[name], engine="eager"), trained(CASES[name])
    assert_alike(eager, captured, 0.03)
    if "topology" not in name or name in ("topology dense", "topology static"):
        return
    masks = zip(eager.parts.topology.masks.values(), captured.parts.topology.masks.values(), strict=True)
    assert sum(int((a != b).sum()) for a, b in masks) <= 0.01 * eager.parts.topology.size


COMPILED = ("topology rigl", "correction replay", "objective at recompute", "objective at with clean images")


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_compiled_steps_train_as_eager_ones_do(case: str, precision: str) -> None:
    extra = {"precision": precision, "epochs": 1}
    eager, captured = trained(CASES[case], engine="eager", **extra), trained(CASES[case], compile=True, **extra)
    assert_alike(eager, captured, 0.03 if precision == "float32" else 0.3)


def test_start_up_is_told_apart_from_training() -> None:
    found = trained(CASES["topology rigl"], compile=True, epochs=4).history
    start_up, seconds = ([line[key] for line in found] for key in ("startup_seconds", "seconds"))
    epochs = [after - before for before, after in zip([0.0, *seconds], seconds, strict=False)]
    assert start_up[0] > 1  # compiling takes long
    assert start_up[2] == start_up[3]  # and is done once
    assert min(epochs) > 0
    assert epochs[0] < start_up[0]


def test_bsr_net_keeps_its_budget_and_its_signs() -> None:
    topology = {"name": "bsr-net", "sparsity": 0.9, "distribution": "uniform"}
    trainer = Trainer(make_recipe({**BASE, "topology": topology, "optimizer": "sgdw"}))
    trainer.captured = CapturedStep(trainer, compile=True)
    budget = sum(layer.final for layer in trainer.parts.topology.layers)
    trainer.parts.model.train()
    for _ in range(8):
        trainer._step(())
        trainer.batch += 1
        layers = trainer.parts.topology.layers
        assert sum(int(layer.mask().sum()) for layer in layers) == budget
        for layer in layers:
            assert layer.memory is not None
            weight, mask = layer.parameter.detach(), layer.mask()
            assert (weight[~mask] == 0).all()
            assert (weight[mask] * layer.memory[mask] > 0).all()


def test_a_captured_run_goes_on_where_it_stopped(tmp_path: Any) -> None:
    case = CASES["correction replay"]
    whole = trained(case)
    first = Trainer(make_recipe({**BASE, **case}))
    first.captured = CapturedStep(first, compile=False)
    first._run_epoch()
    state = first.state_dict()
    second = Trainer(make_recipe({**BASE, **case}))
    second.load_state_dict(state)
    second.captured = CapturedStep(second, compile=False)
    second._run_epoch()
    assert distance(whole, second) < 1e-3


def test_what_cannot_be_captured_runs_in_eager_mode_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(CapturedStep, "_make_batch", fail)
    trainer = Trainer(make_recipe({**BASE, "epochs": 1}))
    with pytest.warns(UserWarning, match="eager mode"):
        trainer._run_epoch()
    assert trainer.captured is None
    assert trainer.history[-1]["step"] == len(trainer.parts.train)
