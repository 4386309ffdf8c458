"""The published code of AGENT as options of recipes, against its formulas in numpy."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from double_helpers import float64_by_default
from equipoise.errors import UserError
from equipoise.training import Trainer, make_recipe
from equipoise.training.evaluate import score
from equipoise.training.recipe_files import read_recipe
from replay_engine import FixedAddressEngine, ReplayEngine
from train_helpers import assert_same_state, bits

Array = NDArray[np.float64]
SHIFTS = {"crop": False, "shift": 0.2, "fractional": True}
PUBLISHED = {
    "correction": {"name": "agent", "mode": "recompute", "coefficient": "as_published"},
    "as_published": {"raw_full_pass": True, "bn_trace": True, "score": True},
}


def recipe(**changes: Any) -> dict[str, Any]:
    """Three batches of digits per epoch, plain SGD, no rewiring."""
    base = {
        "model": {"name": "mlp", "hidden": 8},
        "data": {"name": "digits", "batch": 479, "augment": SHIFTS, "normalize": False},
        "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
        "schedule": "constant",
        "precision": "float32",
        "storage": "masked",
        "epochs": 3,
        "device": "cpu",
    }
    return {**base, **changes}


def made(**changes: Any) -> Trainer:
    return Trainer(make_recipe(recipe(**changes)))


def made_with_norms(**changes: Any) -> Trainer:
    """A network with BatchNorm on three batches of 80 images, without averaged weights."""
    data = {"name": "digits", "batch": 80, "augment": SHIFTS, "normalize": False, "validation": 1197}
    return made(model="small", data=data, ema=0.0, bn_recalibration_batches=1, epochs=2, **changes)


# The published rule in numpy


def gradient(weights: list[Array], x: Array, y: NDArray[np.int64]) -> list[Array]:
    """Gradient of the mean cross-entropy of two hidden ReLU layers."""
    w1, b1, w2, b2, w3, b3 = weights
    first = np.maximum(x @ w1.T + b1, 0)
    second = np.maximum(first @ w2.T + b2, 0)
    logits = second @ w3.T + b3
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    at_second = (p @ w3) * (second > 0)
    at_first = (at_second @ w2) * (first > 0)
    return [at_first.T @ x, at_first.sum(0), at_second.T @ first, at_second.sum(0), p.T @ second, p.sum(0)]


def batches(trainer: Trainer, epoch: int) -> list[tuple[Array, Array, NDArray[np.int64]]]:
    """Augmented images, the same images from the dataset, and labels."""
    loader = trainer.parts.train
    plan, start, found = loader.order.plan(epoch), 0, []
    for x, y in loader.epoch(epoch):
        chosen = plan.images[start : start + len(y)]
        start += len(y)
        raw = loader.images.images[chosen].double().numpy() / 255
        found.append((x.double().flatten(1).numpy(), raw.reshape(len(y), -1), y.numpy()))
    return found


def weights_of(trainer: Trainer) -> list[Array]:
    return [p.detach().double().numpy().copy() for p in trainer.parts.model.parameters()]


def mean(gradients: list[list[Array]]) -> list[Array]:
    return [np.mean(parts, axis=0) for parts in zip(*gradients, strict=True)]


def test_steps_follow_the_published_rule() -> None:
    """g = g_new - w·(g_old - g̃), g̃ on raw images, w = 0.1·(1 - 0.7^e)."""
    with float64_by_default():
        trainer = made(**PUBLISHED)
        theta = weights_of(trainer)
        trainer.run()
    for epoch in range(3):
        old, w = [p.copy() for p in theta], 0.1 * (1 - 0.7**epoch)
        full = mean([gradient(old, raw, y) for _, raw, y in batches(trainer, epoch)])
        for x, _, y in batches(trainer, epoch):
            sides = zip(gradient(theta, x, y), gradient(old, x, y), full, strict=True)
            theta = [p - 0.2 * (new - w * (o - g)) for p, (new, o, g) in zip(theta, sides, strict=True)]
    for found, expected in zip(weights_of(trainer), theta, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)  # images are float32
    assert [line["correction"]["c"] for line in trainer.history] == pytest.approx([0, 0.3, 0.51])


def test_the_control_mixes_the_raw_gradient_into_every_step() -> None:
    """g = 0.9·g(augmented) + 0.1·g(raw)."""
    with float64_by_default():
        trainer = made(as_published={"raw_gradient": 0.1})
        theta = weights_of(trainer)
        trainer.run()
    for epoch in range(3):
        for x, raw, y in batches(trainer, epoch):
            pairs = zip(theta, gradient(theta, x, y), gradient(theta, raw, y), strict=True)
            theta = [p - 0.2 * (0.9 * a + 0.1 * b) for p, a, b in pairs]
    for found, expected in zip(weights_of(trainer), theta, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert trainer.history[-1]["passes"] == {"forward": 18, "backward": 18}


def test_raw_images_of_the_control_leave_no_trace() -> None:
    after = []
    for fraction in (0.0, 0.1):
        trainer = made_with_norms(as_published={"raw_gradient": fraction})
        trainer.parts.model.train()
        trainer.take_step()
        after.append(dict(trainer.parts.model.named_buffers()))
    for name in after[0]:
        torch.testing.assert_close(after[1][name], after[0][name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bn_trace", [False, True])
def test_a_full_pass_leaves_a_trace_only_if_asked_for(bn_trace: bool) -> None:
    published = {**PUBLISHED["as_published"], "bn_trace": bn_trace, "score": False}
    trainer = made_with_norms(correction=PUBLISHED["correction"], as_published=published)
    trainer.parts.model.train()
    convolution, norm = trainer.parts.model.features[0], trainer.parts.model.features[1]
    weight = convolution.weight.detach().double()
    mean, variance = np.zeros(32), np.ones(32)
    for _, raw, _ in batches(trainer, 0) if bn_trace else []:
        out = F.conv2d(torch.from_numpy(raw).view(-1, 1, 8, 8), weight, padding=1).numpy()
        mean = 0.9 * mean + 0.1 * out.mean((0, 2, 3))
        variance = 0.9 * variance + 0.1 * out.var((0, 2, 3), ddof=1)
    trainer.parts.step.refresh(0, 6)
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), variance, rtol=1e-4)


# The score


@pytest.mark.parametrize("correction", ["sgd", {"name": "agent", "mode": "recompute"}])
def test_the_score_is_taken_one_step_after_a_raw_pass(correction: Any) -> None:
    """The published sequence, literally: a pass over raw images in training mode, a step, a test."""
    trainer = made_with_norms(correction=correction, as_published={"score": True})
    literal = made_with_norms(correction=correction)
    for run in (trainer, literal):
        run.run_epoch()
        run.parts.model.train()
    with torch.no_grad():
        for x, _ in literal.parts.train.epoch(1, raw=True):
            literal.parts.model(x)
    for run in (trainer, literal):
        run.take_step()
    expected = score(literal.parts.model, literal.parts.loaders["validation"].epoch(0))
    assert trainer.published is not None
    assert trainer.published.accuracy == expected.accuracy
    assert trainer.published.loss == pytest.approx(expected.loss, rel=1e-5)


def test_the_score_of_the_trace_is_that_of_the_live_model() -> None:
    trainer = made_with_norms(**PUBLISHED)
    trainer.run_epoch()
    trainer.parts.model.train()
    trainer.take_step()
    assert trainer.published == score(trainer.parts.model, trainer.parts.loaders["validation"].epoch(0))


def test_scoring_leaves_the_training_alone() -> None:
    plain, scored = made_with_norms(), made_with_norms(as_published={"score": True})
    for run in (plain, scored):
        run.run()
    states = zip(plain.parts.model.state_dict().items(), scored.parts.model.state_dict().values(), strict=True)
    for (name, left), right in states:
        assert bits(left) == bits(right), name
    assert set(plain.history[-1]["scores"]) == {"plain", "bn_recalibrated"}
    assert set(scored.history[-1]["scores"]) == {"plain", "bn_recalibrated", "as_published"}
    assert plain.best == scored.best  # the published score never chooses a checkpoint


def test_a_resumed_epoch_keeps_its_score() -> None:
    whole, first, second = (made_with_norms(**PUBLISHED) for _ in range(3))
    whole.run_epoch()
    first.parts.model.train()
    first.take_step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.run_epoch()
    assert second.history[0]["scores"] == whole.history[0]["scores"]


# Engines and recipes


@pytest.mark.parametrize(
    "changes", [PUBLISHED, {"as_published": {"raw_gradient": 0.1, "score": True}}], ids=["agent", "control"]
)
@pytest.mark.parametrize("objective", ["standard", {"name": "at", "steps": 1}], ids=["standard", "at"])
def test_replayed_steps_are_eager_steps(
    changes: dict[str, Any], objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.objectives.attack.check_pixels", lambda x: None)  # it reads values
    states, replays = [], ReplayEngine()
    topology = {"name": "bsr-net", "sparsity": 0.8, "distribution": "uniform"}
    for engine in (FixedAddressEngine(), replays):
        raw = recipe(topology=topology, objective=objective, epochs=2, **changes)
        run = Trainer(make_recipe(raw), engine=engine)
        run.run()
        states.append({k: v for k, v in run.state_dict().items() if "seconds" not in k})
    assert_same_state(*states)
    assert replays.replays > 0


def test_the_overlay_is_the_published_code() -> None:
    found = make_recipe(read_recipe("bsr-vgg16-cifar10", "agent-as-published"))
    assert found.as_published.raw_full_pass
    assert found.as_published.bn_trace
    assert found.as_published.score
    assert (found.correction.gamma, found.correction.mode) == (0.1, "recompute")
    assert type(found.correction.coefficient).__name__ == "AsPublished"


@pytest.mark.parametrize("objective", ["at", "trades", "mart", "mixed"])
@pytest.mark.parametrize("correction", ["agent", "svrg", "fixed"])
def test_a_correction_keeps_its_full_pass_in_adversarial_training(correction: str, objective: str) -> None:
    """The overlay `agent` is the paper's method: g̃ on clean images, not the mean of earlier old gradients."""
    trainer = made(correction=correction, objective={"name": objective, "steps": 1})
    assert trainer.parts.correction.estimator.mode == "recompute"
    assert trainer.parts.batches.full_pass_is_clean


def test_nothing_is_published_by_default() -> None:
    options = make_recipe(recipe(correction="agent")).as_published
    assert not any(vars(options).values())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"as_published": {"raw_full_pass": True}}, "need a full pass"),
        (
            {"as_published": {"bn_trace": True}, "correction": {"name": "agent", "mode": "running"}},
            "need a full pass",
        ),
        (
            {"as_published": {"raw_full_pass": True}, "correction": {"name": "agent", "mode": "replay"}},
            "needs correction.mode=recompute",
        ),
        (
            {"as_published": {"raw_full_pass": True}, "correction": "agent", "full_pass": "adversarial"},
            "use full_pass=clean",
        ),
        ({"as_published": {"raw_gradient": 1.0}}, "raw_gradient=1.0 must be at least 0 and below 1"),
        ({"as_published": {"raw": True}}, 'as_published: no option is called "raw"'),
    ],
)
def test_wrong_options_are_told_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        make_recipe(recipe(**changes))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_raw_batches_are_the_images_of_the_dataset() -> None:
    loader = made().parts.train
    for (x, _), (raw, _), (_, expected, _) in zip(
        loader.epoch(1), islice(loader.epoch(1, raw=True), 3), batches(made(), 1), strict=True
    ):
        np.testing.assert_allclose(raw.flatten(1).numpy(), expected, rtol=1e-6)
        assert not torch.equal(x, raw)
