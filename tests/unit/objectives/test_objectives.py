"""Objectives against float64 oracles for a linear model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.objectives import OBJECTIVES, AdversarialTraining, Mart, Mixed, Standard, Trades
from equipoise.objectives.attack import PGD
from equipoise.sparse import pack
from equipoise.topology import Static

Array = np.ndarray
ADVERSARIAL = ["at", "trades", "mart", "mixed"]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def kl(p: Array, q: Array) -> Array:
    return (p * (np.log(p) - np.log(q))).sum(1)


class Problem:
    """A linear classifier of 6 pixels in three classes, W x + b, in numpy and as a module."""

    def __init__(self, seed: int = 0, scale: float = 3.0) -> None:
        rng = np.random.default_rng(seed)
        self.w, self.b = scale * rng.standard_normal((3, 6)), rng.standard_normal(3)
        self.x = rng.random((5, 6))
        self.x[0, :2] = 0.0, 1.0
        self.adversarial = np.clip(self.x + 0.1 * rng.standard_normal((5, 6)), 0, 1)
        self.y = rng.integers(0, 3, 5)
        self.model = nn.Linear(6, 3).double()
        self.model.weight.data = torch.from_numpy(self.w.copy())
        self.model.bias.data = torch.from_numpy(self.b.copy())

    def logits(self, x: Array, w: Array | None = None) -> Array:
        return x @ (self.w if w is None else w).T + self.b

    def tensors(self, *names: str) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(getattr(self, name)) for name in names)

    def noise(self, seed: int) -> Array:
        drawn = torch.empty(self.x.shape, dtype=torch.float64)
        return 0.001 * drawn.normal_(generator=torch.Generator().manual_seed(seed)).numpy()

    def climb(self, gradient, seed: int, eps: float = 8 / 255, step: float = 2 / 255, steps: int = 10) -> Array:
        """Sign ascent from x + 0.001·N(0, 1), clipped to the box."""
        low, high = np.maximum(self.x - eps, 0), np.minimum(self.x + eps, 1)
        x = np.clip(self.x + self.noise(seed), low, high)
        for _ in range(steps):
            x = np.clip(x + step * np.sign(gradient(x)), low, high)
        return x


def cross_entropy(z: Array, y: Array) -> float:
    return -np.log(softmax(z)[np.arange(len(y)), y]).mean()


def mart_loss(problem: Problem, w: Array, beta: float = 5.0) -> float:
    p, q = softmax(problem.logits(problem.x, w)), softmax(problem.logits(problem.adversarial, w))
    total = 0.0
    for i, label in enumerate(problem.y):
        rival = max(q[i, k] for k in range(3) if k != label)
        boosted = -np.log(q[i, label]) - np.log(1.0001 - rival)
        total += boosted + beta * (1 - p[i, label]) * kl(p, q)[i]
    return total / len(problem.y)


# TRADES


@pytest.mark.parametrize("steps", [3, 10])  # before and after the box is reached
def test_trades_examples_equal_the_oracle(steps: int) -> None:
    problem = Problem()
    p = softmax(problem.logits(problem.x))
    oracle = problem.climb(lambda x: (softmax(problem.logits(x)) - p) @ problem.w, 4, steps=steps)  # ∇ KL(p ‖ q)
    x, y = problem.tensors("x", "y")
    batch = Trades(steps=steps).prepare(problem.model, x, y, torch.Generator().manual_seed(4))
    assert batch[0] is x
    assert batch[1] is y
    np.testing.assert_allclose(batch[2].numpy(), oracle, atol=1e-12)


def test_trades_loss_and_gradient_equal_the_oracle() -> None:
    problem = Problem()
    clean, perturbed = problem.logits(problem.x), problem.logits(problem.adversarial)
    p, q, n = softmax(clean), softmax(perturbed), len(problem.y)
    loss, logits = Trades().loss(problem.model, *problem.tensors("x", "y", "adversarial"))
    assert loss.item() == pytest.approx(cross_entropy(clean, problem.y) + 6 * kl(p, q).mean(), rel=1e-12)
    np.testing.assert_allclose(logits.detach().numpy(), clean, rtol=1e-12)
    # the gradient flows through both predictions
    by_clean = p - np.eye(3)[problem.y] + 6 * p * (np.log(p / q) - kl(p, q)[:, None])
    by_perturbed = 6 * (q - p)
    loss.backward()
    expected = (by_clean.T @ problem.x + by_perturbed.T @ problem.adversarial) / n
    np.testing.assert_allclose(problem.model.weight.grad.numpy(), expected, rtol=1e-10)


# MART


@pytest.mark.parametrize("steps", [3, 10])
def test_mart_examples_climb_cross_entropy_from_a_normal_start(steps: int) -> None:
    problem = Problem()
    target = np.eye(3)[problem.y]
    oracle = problem.climb(lambda x: (softmax(problem.logits(x)) - target) @ problem.w, 5, steps=steps)
    x, y = problem.tensors("x", "y")
    batch = Mart(steps=steps).prepare(problem.model, x, y, torch.Generator().manual_seed(5))
    np.testing.assert_allclose(batch[0].numpy(), oracle, atol=1e-12)
    assert batch[1] is y
    assert batch[2] is x


@pytest.mark.parametrize("seed", range(3))
def test_mart_loss_and_gradient_equal_the_oracle(seed: int) -> None:
    problem = Problem(seed, scale=1.0)
    loss, logits = Mart().loss(problem.model, *problem.tensors("adversarial", "y", "x"))
    assert loss.item() == pytest.approx(mart_loss(problem, problem.w), rel=1e-12)
    np.testing.assert_allclose(logits.detach().numpy(), problem.logits(problem.adversarial), rtol=1e-12)
    loss.backward()
    for k, j in np.ndindex(problem.w.shape):
        nudge = np.zeros_like(problem.w)
        nudge[k, j] = 1e-6
        slope = (mart_loss(problem, problem.w + nudge) - mart_loss(problem, problem.w - nudge)) / 2e-6
        assert problem.model.weight.grad[k, j].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


# Standard, AT, mixed


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_standard_loss_equals_the_oracle(smoothing: float) -> None:
    problem = Problem()
    objective = Standard(label_smoothing=smoothing)
    x, y = problem.tensors("x", "y")
    batch = objective.prepare(problem.model, x, y, None)
    assert batch[0] is x
    assert batch[1] is y
    loss, _ = objective.loss(problem.model, *batch)
    target = (1 - smoothing) * np.eye(3)[problem.y] + smoothing / 3
    log_p = np.log(softmax(problem.logits(problem.x)))
    assert loss.item() == pytest.approx(-(target * log_p).sum(1).mean(), rel=1e-12)


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_at_mixes_in_the_clean_loss(fraction: float) -> None:
    problem = Problem()
    objective = AdversarialTraining(clean_fraction=fraction)
    x, y = problem.tensors("x", "y")
    batch = objective.prepare(problem.model, x, y, torch.Generator().manual_seed(2))
    assert torch.equal(batch[0], PGD().perturb(problem.model, x, y, torch.Generator().manual_seed(2)))
    loss, logits = objective.loss(problem.model, *batch)
    perturbed = problem.logits(batch[0].numpy())
    expected = (1 - fraction) * cross_entropy(perturbed, problem.y)
    expected += fraction * cross_entropy(problem.logits(problem.x), problem.y)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(logits.detach().numpy(), perturbed, rtol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_clean_images_do_not_update_running_statistics(packed: bool) -> None:
    """Statistics are those of the attacked images alone; the gradient is that of both losses."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    model(torch.zeros(2, 3, 8, 8))
    if packed:
        model = pack(model, Static(sparsity=0.5))
    x, adversarial, y = torch.rand(8, 3, 8, 8), torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    attacked, clean = copy.deepcopy(model), copy.deepcopy(model)
    for images, peer in ((adversarial, attacked), (x, clean)):
        nn.functional.cross_entropy(peer(images), y).backward()
    before = {name: value.clone() for name, value in model.named_buffers()}
    loss, _ = AdversarialTraining(clean_fraction=0.25).loss(model, adversarial, y, x)
    loss.backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(attacked.named_buffers()), rtol=0, atol=0)
    assert any(not torch.equal(value, before[name]) for name, value in model.named_buffers())
    for own, one, two in zip(model.parameters(), attacked.parameters(), clean.parameters(), strict=True):
        torch.testing.assert_close(own.grad, 0.75 * one.grad + 0.25 * two.grad)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_mixed_attacks_the_second_half(count: int) -> None:
    problem = Problem()
    x, y = (tensor[:count] for tensor in problem.tensors("x", "y"))
    mixed, labels = Mixed().prepare(problem.model, x, y, torch.Generator().manual_seed(0))
    changed = (mixed != x).any(1)
    assert changed.tolist() == [i >= count // 2 for i in range(count)]
    assert labels is y
    loss, logits = Mixed().loss(problem.model, mixed, y)
    expected = cross_entropy(problem.logits(mixed.numpy()), problem.y[:count])
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert logits.shape == (count, 3)


# All objectives


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_order_and_restored_model(name: str) -> None:
    """batch[0] holds the images of the logits; preparing changes neither the model, the images nor the RNG."""
    objective = OBJECTIVES[name]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    x, y = Problem().tensors("x", "y")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random_state, clean = torch.get_rng_state(), x.clone()
    batch = objective.prepare(model, x, y, torch.Generator().manual_seed(0))
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(x, clean)
    assert not any(tensor.requires_grad for tensor in batch)
    model.eval()
    _, logits = objective.loss(model, *batch)
    torch.testing.assert_close(logits, model(batch[0]))
    assert torch.equal(batch[1], y)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_two_models_see_the_same_batch(name: str) -> None:
    """The loss of another model is computed on the images prepared for the first one."""
    objective, now, then = OBJECTIVES[name](), Problem(0), Problem(1)
    x, y = now.tensors("x", "y")
    batch = objective.prepare(now.model, x, y, torch.Generator().manual_seed(0))
    kept = [tensor.clone() for tensor in batch]
    seen: list[Tensor] = []

    def snapshot(images: Tensor) -> Tensor:
        seen.append(images)
        return then.model(images)

    objective.loss(now.model, *batch)
    objective.loss(snapshot, *batch)
    assert len(seen) == objective.loss_passes
    assert all(any(images is tensor for tensor in batch) for images in seen)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(batch, kept, strict=True))


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_attack_draws_from_the_generator_alone(name: str) -> None:
    objective, problem = OBJECTIVES[name](), Problem()
    x, y = problem.tensors("x", "y")

    def prepared(seed: int) -> Tensor:
        batch = objective.prepare(problem.model, x, y, torch.Generator().manual_seed(seed))
        return torch.cat([tensor.double().flatten() for tensor in batch])

    assert torch.equal(prepared(0), prepared(0))
    with pytest.raises(UserError, match="pass a torch"):
        objective.prepare(problem.model, x, y, None)


def test_passes_are_counted_as_they_are_run() -> None:
    class Counting(nn.Linear):
        forwards = 0

        def forward(self, input: Tensor) -> Tensor:
            self.forwards += len(input)
            return super().forward(input)

    x, y = torch.rand(4, 6), torch.tensor([0, 1, 2, 0])
    for name, extra in (("standard", 0), ("at", 0), ("trades", 1), ("mart", 0), ("mixed", 0)):
        model = Counting(6, 3)
        objective = OBJECTIVES[name]()
        batch = objective.prepare(model, x, y, torch.Generator().manual_seed(0))
        # TRADES needs one more forward pass of the clean images, without a backward pass
        assert model.forwards == (objective.attack_passes + extra) * len(x), name
        objective.loss(model, *batch)
        assert model.forwards == (objective.attack_passes + extra + objective.loss_passes) * len(x), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_of_16_bit_logits_is_computed_in_float32(name: str) -> None:
    problem = Problem()
    model = problem.model.to(torch.bfloat16)
    x, y = problem.tensors("x", "y")
    objective = OBJECTIVES[name]()
    batch = objective.prepare(model, x.bfloat16(), y, torch.Generator().manual_seed(0))
    loss, _ = objective.loss(model, *batch)
    assert loss.dtype == torch.float32
    loss.backward()
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["trades", "mart"])
def test_saturated_logits_give_finite_loss_and_gradient(name: str) -> None:
    problem = Problem(scale=3000.0)
    model = problem.model.float()
    x, y = problem.tensors("x", "y")
    objective = OBJECTIVES[name]()
    batch = objective.prepare(model, x.float(), y, torch.Generator().manual_seed(0))
    loss, _ = objective.loss(model, *batch)
    loss.backward()
    assert loss.isfinite()
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("standard", {"label_smoothing": 1.0}, "label_smoothing must be"),
        ("at", {"clean_fraction": 1.0}, "clean_fraction must be"),
        ("at", {"eps": 8}, "8/255"),
        ("at", {"norm": "l3"}, 'no norm is called "l3"'),
        ("trades", {"beta": -1.0}, "beta must be"),
        ("mart", {"beta": float("nan")}, "beta must be"),
        ("mixed", {"steps": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_named(name: str, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        OBJECTIVES[name](**settings)


def test_catalogue_names_and_describes() -> None:
    with pytest.raises(UserError, match='did you mean "trades"'):
        OBJECTIVES["trade"]
    assert all(OBJECTIVES.describe().values())
