"""Bias of a correction in adversarial training: none, or exactly the one that the paper names."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.objectives import PGD, AdversarialTraining
from equipoise.training.trainer import Trainer
from robust_helpers import STEPS, double, flat, gradients_of_steps, set_weights

__all__ = ["double"]  # a fixture

# No BatchNorm, so that the mean over batches is the mean over images in any order.
EXACT = ["model=mlp", "topology=static", "topology.sparsity=0.5"]


class Problem(NamedTuple):
    """Full gradients of all training images at active weights, by plain autograd."""

    trainer: Trainer
    active: Tensor

    def gradient(self, made_at: Tensor | None, taken_at: Tensor) -> Tensor:
        """Mean gradient at weights `taken_at` of images attacked at weights `made_at`; None for clean images."""
        objective = self.trainer.recipe.objective
        assert isinstance(objective, AdversarialTraining)
        return torch.stack(
            [
                self._at(taken_at, x if made_at is None else self._attacked(objective.attack, made_at, x, y), y)
                for x, y in self.trainer.parts.train.epoch(0)
            ]
        ).mean(0)

    def weights(self) -> Tensor:
        return flat(self.trainer.parts.model.parameters()).clone()

    def _at(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        model, now = self.trainer.parts.model, self.weights()
        set_weights(model, weights)
        gradient = flat(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))
        set_weights(model, now)
        return gradient * self.active

    def _attacked(self, attack: PGD, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        model, now = self.trainer.parts.model, self.weights()
        set_weights(model, weights)
        images = attack.perturb(model, x, y)
        set_weights(model, now)
        return images


def corrected_means(trainer: Trainer, move: Tensor) -> tuple[Tensor, Tensor]:
    """Mean gradient of the steps of an epoch at the snapshot, and of one away from it before the next refresh."""
    gradients = gradients_of_steps(trainer, {STEPS: move})
    assert len(gradients) == 2 * STEPS
    return gradients[:STEPS].mean(0), gradients[STEPS:].mean(0)


@pytest.fixture
def problem(double: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Problem]:
    """Attacks have no random start, so that a step has the images of the full pass and E g_old = g̃ exactly."""
    monkeypatch.setattr(AdversarialTraining, "start", "none")

    def made(*overrides: str) -> Problem:
        once = ["epochs=2", "correction=svrg", f"correction.every={2 * STEPS}"]  # one refresh in two epochs
        trainer = double(*EXACT, *once, *overrides)
        masks = trainer.parts.topology.masks
        named = trainer.parts.model.named_parameters()
        return Problem(trainer, flat(masks.get(name, torch.ones_like(p)) for name, p in named).double())

    return made


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_an_adversarial_full_pass_is_unbiased_at_the_snapshot(weight: float, problem: Callable[..., Problem]) -> None:
    it = problem("full_pass=adversarial", f"correction.coefficient.value={weight}")
    start = it.weights()
    at_snapshot, _ = corrected_means(it.trainer, torch.zeros_like(start))
    assert_close(at_snapshot, it.gradient(start, start))


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_clean_full_pass_has_the_bias_that_the_paper_names(weight: float, problem: Callable[..., Problem]) -> None:
    """E g = E g_new - w·(E g_old - g̃), with g_old of adversarial and g̃ of clean images: γ is there to shrink it."""
    it = problem("full_pass=clean", f"correction.coefficient.value={weight}")
    start = it.weights()
    at_snapshot, _ = corrected_means(it.trainer, torch.zeros_like(start))
    adversarial, clean = it.gradient(start, start), it.gradient(None, start)
    assert_close(at_snapshot - adversarial, -weight * (adversarial - clean))
    assert (adversarial - clean).norm() > 0.1 * adversarial.norm()  # the bias is not small


@pytest.mark.parametrize("full_pass", ["clean", "adversarial"])
def test_away_from_the_snapshot_the_attack_differs(full_pass: str, problem: Callable[..., Problem]) -> None:
    """g_old uses images attacked at the current weights, an adversarial g̃ images attacked at the old weights.

    So both full passes have the bias w·(E g_old - g̃); with adversarial images it grows with the distance to the
    snapshot.
    """
    biases = []
    for rate in (0.01, 1.0):
        it = problem(f"full_pass={full_pass}")
        start = it.weights()
        move = -rate * it.gradient(start, start)
        _, away = corrected_means(it.trainer, move)
        now = it.weights()
        assert torch.equal(now, start + move)
        new, old = it.gradient(now, now), it.gradient(now, start)
        reference = it.gradient(None if full_pass == "clean" else start, start)
        assert_close(away, new - (old - reference))
        biases.append(float((old - reference).norm() / old.norm()))
    near, far = biases
    assert 0 < near < far / 5 if full_pass == "adversarial" else near > 0.1
