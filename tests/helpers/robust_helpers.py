"""Runs of a few steps on the digits with BSR-Net and adversarial training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from double_helpers import float64_by_default
from equipoise.training.build_recipe import make_recipe
from equipoise.training.evaluate import Score
from equipoise.training.recipe import Recipe
from equipoise.training.recipe_files import apply_overrides, read_recipe
from equipoise.training.trainer import Trainer

ADVERSARIAL = ["at", "trades", "mart", "mixed"]
LIGHT = ["objective.steps=2", "objective.step_size=0.05", "ema=0", "bn_recalibration_batches=1"]
TINY = ["epochs=1", "data.validation=1317", "data.batch=40"]  # leaves 120 images: three steps an epoch
STEPS = 3


def make(*overrides: str) -> Recipe:
    return make_recipe(apply_overrides(read_recipe("digits-bsr-at"), [*LIGHT, *overrides]))


def tiny(*overrides: str) -> Recipe:
    return make(*TINY, *overrides)


def tiny_trainer(*overrides: str) -> Trainer:
    """A trainer that skips evaluation."""
    trainer = Trainer(tiny(*overrides))
    trainer.evaluate = lambda split=None: {"plain": Score(0.0, 0.0, 1)}  # type: ignore[method-assign]
    return trainer


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@torch.no_grad()
def set_weights(model: nn.Module, weights: Tensor) -> None:
    """Write a vector into the parameters, whose data may be views of tensors that an optimizer steps."""
    parameters = list(model.parameters())
    for p, part in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
        p.copy_(part.view_as(p))


def gradients_of_steps(trainer: Trainer, moves: dict[int, Tensor] | None = None) -> Tensor:
    """Train with an optimizer that records the gradients, one row per step, and adds `moves` after given steps."""
    model, layout = trainer.parts.model, trainer.parts.flat
    assert layout is not None, "masked storage keeps its gradients in one vector"
    seen: list[Tensor] = []

    def note() -> None:
        seen.append(flat(layout.gradient_of(p) for p in model.parameters()))
        if moves is not None and len(seen) in moves:
            set_weights(model, flat(model.parameters()) + moves[len(seen)])

    trainer.parts.optimizer.step = note  # type: ignore[method-assign, assignment]
    trainer.run()
    return torch.stack(seen)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """Trainers and images in float64."""
    monkeypatch.setattr("equipoise.data.loader.unit", lambda images: images.double().mul_(1 / 255))

    def trainer(*overrides: str) -> Trainer:
        with float64_by_default():
            return tiny_trainer("storage=masked", *overrides)

    return trainer
