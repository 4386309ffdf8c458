"""The captured step without its graphs, on the CPU: the same training as eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equipoise.training.captured import CapturedStep, obstacle
from equipoise.training.flat import Flat
from equipoise.training.rule import RULES
from equipoise.training.update import Update
from torch import nn

from equipoise.topology import BSRNet
from equipoise.training import Trainer, make_recipe
from equipoise.training.evaluate import Score
from equipoise.training.optimizers import SGDW

BASE: dict[str, Any] = {
    "model": "small",
    "data": {"name": "digits", "batch": 450, "augment": {"pad": 2}},
    "optimizer": {"name": "sgd", "lr": 0.01},
    "schedule": {"name": "cosine"},
    "device": "cpu",
    "epochs": 2,
}
SET: dict[str, Any] = {"name": "set", "sparsity": 0.8, "every": 3}
CASES: dict[str, dict[str, Any]] = {
    "set": {"topology": SET},
    "rigl": {"topology": {**SET, "name": "rigl"}},
    "snfs, adam": {"topology": {**SET, "name": "snfs"}, "optimizer": {"name": "adam", "lr": 1e-4}},
    "replay": {"topology": SET, "correction": {"name": "agent", "mode": "replay"}},
    "running": {"topology": SET, "correction": {"name": "agent", "mode": "running", "step_fraction": 0.5}},
    "mvr": {"topology": SET, "correction": "mvr"},
    "saga": {"topology": SET, "correction": "saga"},
    "at": {"topology": SET, "objective": {"name": "at", "steps": 1}, "correction": "agent"},
    "at with clean images": {"topology": SET, "objective": {"name": "at", "steps": 1, "clean_fraction": 0.3}},
}


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In float64 rounding does not grow into other masks, so that equal is equal."""

    def unit(images: torch.Tensor) -> torch.Tensor:
        return images.double() / 255

    monkeypatch.setattr("equipoise.data.loader.unit", unit)
    monkeypatch.setattr("equipoise.training.batch.unit", unit)
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: {"plain": Score(0.0, 0.0, 0)})
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(case: dict[str, Any], captured: bool) -> Trainer:
    trainer = Trainer(make_recipe({**BASE, **case}))
    if captured:
        assert obstacle(trainer) == ""
        trainer.captured = CapturedStep(trainer, compile=False, capture=False)
    while trainer.epoch < trainer.recipe.epochs:
        trainer._run_epoch()
    return trainer


QUICK = ("rigl", "replay")


@pytest.mark.parametrize("name", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_same_training_as_eager_steps(name: str) -> None:
    eager, captured = trained(CASES[name], False), trained(CASES[name], True)
    torch.testing.assert_close(captured.parts.model.state_dict(), eager.parts.model.state_dict(), rtol=0, atol=1e-9)
    torch.testing.assert_close(captured.parts.average.values, eager.parts.average.values, rtol=0, atol=1e-9)
    assert all(
        torch.equal(mask, eager.parts.topology.masks[layer]) for layer, mask in captured.parts.topology.masks.items()
    )
    one, two = captured.history[-1], eager.history[-1]
    assert one["correction"] == pytest.approx(two["correction"], rel=1e-6)
    for key in ("step", "updates", "passes", "exploration", "train_accuracy", "learning_rate"):
        assert one[key] == two[key], key


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.SGD, {"momentum": 0.0}),
        (SGDW, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"weight_decay": 0.01}),
        (torch.optim.AdamW, {"weight_decay": 0.01}),
    ],
)
def test_rules_are_the_optimizers(optimizer: Any, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(30))
    peer = optimizer([weight], lr=0.1, **options)
    rule = RULES[optimizer](peer.param_groups[0])
    own, states = weight.detach().clone(), [torch.zeros(30) for _ in rule.states]
    for step in range(5):
        peer.param_groups[0]["lr"] = 0.1 / (step + 1)
        weight.grad = torch.randn(30)
        own = rule.step(own, weight.grad.clone(), states, torch.tensor(rule.numbers(step)))
        peer.step()
        torch.testing.assert_close(own, weight.detach(), rtol=1e-12, atol=1e-12)


def test_rewiring_keeps_the_budget_and_draws_layers_by_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.Linear(50, 31), nn.Linear(7, 300))
    optimizer = SGDW(model.parameters(), lr=0.1)
    topology = BSRNet(sparsity=0.9, distribution="uniform", noise=0.0).attach(model, optimizer)
    flat = Flat(optimizer, topology)
    update = Update(optimizer, topology, None, flat, lambda function: function)
    grown = {layer.name: torch.zeros(layer.parameter.shape) for layer in topology.layers}
    for _ in range(500):
        flat.gradients.normal_()
        before = {layer.name: layer.mask() for layer in topology.layers}
        update.set_numbers()
        update()
        update.count_step()
        assert sum(int(layer.mask().sum()) for layer in topology.layers) == sum(la.final for la in topology.layers)
        for layer in topology.layers:
            weight, mask = layer.parameter.detach(), layer.mask()
            assert layer.memory is not None
            assert (weight[~mask] == 0).all()
            assert (weight[mask] * layer.memory[mask] > 0).all()
            grown[layer.name] += mask & ~before[layer.name]
    total = sum(float(count.sum()) for count in grown.values())
    # chi-square over the three layers: 13.8 is exceeded once in a thousand draws of the right proportions
    expected = [total * layer.size / topology.size for layer in topology.layers]
    seen = [float(grown[layer.name].sum()) for layer in topology.layers]
    assert sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True)) < 13.8
