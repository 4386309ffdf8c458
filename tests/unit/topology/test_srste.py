"""SR-STE against a simulation of its published update, and what holds in whole trainings."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import equipoise as eq
from equipoise.errors import UserError
from equipoise.topology.pattern import parse_pattern
from pattern_helpers import counts_in_groups

Array = NDArray[np.float64]
RATE, MOMENTUM, WEIGHT_DECAY, LAMBDA = 0.05, 0.9, 1e-3, 2e-2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 8)), RNG.normal(size=(40, 6))
INITIAL = RNG.normal(size=(6, 8))


def projected(latent: Array) -> NDArray[np.bool_]:
    """Mask of the two largest of every four weights along the inputs."""
    mask = np.zeros(latent.shape, bool)
    for row in range(latent.shape[0]):
        for start in range(0, latent.shape[1], 4):
            for column in sorted(range(start, start + 4), key=lambda c: -abs(latent[row, c]))[:2]:
                mask[row, column] = True
    return mask


def simulated(steps: int, clip: float = 0.0) -> tuple[Array, NDArray[np.bool_]]:
    """Linear regression by w ← w - η·(g(m⊙w) + λ·(1-m)⊙w) with momentum and weight decay, in float64."""
    latent, velocity = INITIAL.copy(), np.zeros_like(INITIAL)
    for _ in range(steps):
        mask = projected(latent)
        error = X @ (latent * mask).T - Y
        gradient = 2 * error.T @ X / error.size
        if clip:
            gradient *= min(1.0, clip / (np.linalg.norm(gradient * mask) + 1e-6))
        gradient = gradient + LAMBDA * np.where(mask, 0, latent) + WEIGHT_DECAY * latent
        velocity = MOMENTUM * velocity + gradient
        latent = latent - RATE * velocity
    return latent, projected(latent)


Made = tuple[nn.Linear, torch.optim.Optimizer, eq.Topology]


def make(optimizer: Any = torch.optim.SGD, **options: Any) -> Made:
    model = nn.Linear(8, 6, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(INITIAL))
    rule = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY} if optimizer is torch.optim.SGD else {}
    stepper = optimizer(model.parameters(), **rule)
    return model, stepper, eq.SRSTE(decay=LAMBDA, **options).attach(model, stepper)


def loss_of(model: nn.Module, half: int | None = None) -> torch.Tensor:
    rows = slice(None) if half is None else slice(20 * half, 20 * half + 20)
    return (model(torch.from_numpy(X[rows])) - torch.from_numpy(Y[rows])).square().mean()


def train(made: Made, steps: int) -> None:
    for _ in range(steps):
        loss_of(made[0]).backward()
        made[1].step()
        made[1].zero_grad()


def assert_equal(made: Made, latent: Array, mask: NDArray[np.bool_], rtol: float = 1e-10) -> None:
    memory = made[2].state_dict()["memory"]["weight"].numpy()
    np.testing.assert_allclose(memory, latent, rtol=rtol, atol=1e-12)
    np.testing.assert_array_equal(made[2].masks["weight"].numpy(), mask)
    np.testing.assert_array_equal(made[0].weight.detach().numpy(), memory * mask)


@pytest.mark.parametrize("steps", [0, 1, 2, 40])
def test_the_published_update(steps: int) -> None:
    made = make()
    train(made, steps)
    assert_equal(made, *simulated(steps))


def test_masks_move() -> None:
    made = make()
    before = made[2].masks["weight"]
    train(made, 40)
    assert not torch.equal(before, made[2].masks["weight"])
    assert made[2].exploration > 0.5
    assert made[2].updates == 40


def test_accumulated_and_clipped_gradients() -> None:
    """Latent weights get the factor that clipping gives the active ones."""
    made = make()
    for _ in range(30):
        for half in range(2):
            (loss_of(made[0], half) / 2).backward()
        nn.utils.clip_grad_norm_(made[0].parameters(), 0.2)
        made[1].step()
        made[1].zero_grad()
    assert_equal(made, *simulated(30, clip=0.2), rtol=1e-5)  # the factor is found from the norms


def test_a_grad_scaler_changes_nothing() -> None:
    made = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(30):
        scaler.scale(loss_of(made[0])).backward()
        scaler.step(made[1])
        scaler.update()
        made[1].zero_grad()
    assert_equal(made, *simulated(30), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_resumed_run_and_a_copy_are_the_same_to_the_bit(optimizer: Any) -> None:
    whole, half, resumed = make(optimizer), make(optimizer), make(optimizer)
    train(whole, 20)
    train(half, 9)
    for target, source in zip(resumed, half, strict=True):
        target.load_state_dict(copy.deepcopy(source.state_dict()))  # type: ignore[attr-defined]
    copied = copy.deepcopy(half)
    for made in (resumed, copied):
        train(made, 11)
        assert torch.equal(made[0].weight, whole[0].weight)
        assert torch.equal(made[2].state_dict()["memory"]["weight"], whole[2].state_dict()["memory"]["weight"])


def test_a_weight_that_is_changed_between_steps_counts() -> None:
    made = make()
    active = made[2].masks["weight"]
    with torch.no_grad():
        made[0].weight.zero_()
    train(made, 1)
    latent = made[2].state_dict()["memory"]["weight"]
    assert latent[active].abs().max() < 0.1
    assert latent[~active].abs().max() > 0.3


@pytest.mark.parametrize("pattern", ["1:4", "transposable 2:4", "4x2", "fan_in"])
def test_every_pattern_holds_after_every_step_in_weights_and_average(pattern: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    topology = eq.SRSTE(sparsity=0.75 if pattern == "1:4" else 0.5, pattern=pattern).attach(model, optimizer)
    ema = eq.EMA(model, 0.9, topology)
    counts = {layer.name: layer.final for layer in topology.layers}
    for _ in range(6):
        nn.functional.cross_entropy(model(torch.randn(16, 4, 5, 5)), torch.randint(0, 8, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        for name, mask in topology.masks.items():
            assert len(set(counts_in_groups(mask.numpy(), pattern))) == 1
            assert int(mask.sum()) == counts[name]
            assert not model.get_parameter(name).detach()[~mask].any()
            assert not ema.values[name][~mask].any()


def test_masks_that_are_made_on_the_device() -> None:
    for text, shape in (("2:4", (3, 8, 2, 2)), ("transposable 2:4", (8, 4)), ("2x3", (4, 6)), ("fan_in", (3, 5))):
        pattern = parse_pattern(text)
        assert pattern is not None
        score, count = torch.rand(shape).reshape(-1), pattern.whole(math.prod(shape) // 2, shape)
        mask = pattern.largest_mask(score, count, shape)
        assert set(mask.flatten().nonzero().flatten().tolist()) == set(pattern.largest(score, count, shape).tolist())


def test_packed_storage_and_lbfgs_are_refused() -> None:
    model = eq.sparse.pack(nn.Sequential(nn.Linear(8, 8)), eq.Static(sparsity=0.5, pattern="2:4"))
    with pytest.raises(UserError, match="SR-STE trains the inactive weights too: use masked storage"):
        eq.SRSTE().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="which LBFGS does not support; use SGD or Adam"):
        make(torch.optim.LBFGS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": ""}, 'pattern="": SR-STE projects on a pattern, such as "2:4"'),
        ({"decay": -1}, "decay=-1: λ of λ·"),
        ({"sparsity": 0.9}, 'sparsity=0.9: pattern="2:4" has sparsity=0.5'),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        eq.SRSTE(**options)
