"""HYDRA against a simulation with autograd's straight-through estimator, and what holds in whole trainings."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import equipoise as eq
from equipoise.errors import UserError

Array = NDArray[np.float64]
RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 1e-3
DENSE, LEARN, TOTAL, KEPT = 5, 20, 40, 12  # phases in steps, and weights that are kept of 6 x 8
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 8)), RNG.normal(size=(40, 6))
INITIAL = RNG.normal(size=(6, 8))
Made = tuple[nn.Linear, torch.optim.Optimizer, eq.Topology]


class Sgd:
    """SGD with momentum and weight decay."""

    def __init__(self) -> None:
        self.velocity = np.zeros_like(INITIAL)

    def step(self, value: Array, gradient: Array) -> Array:
        self.velocity = MOMENTUM * self.velocity + gradient + WEIGHT_DECAY * value
        return value - RATE * self.velocity


def gradient_at(weight: Array) -> Array:
    error = X @ weight.T - Y
    return 2 * error.T @ X / error.size


def largest(score: Array, count: int) -> NDArray[np.bool_]:
    mask = np.zeros(score.size, bool)
    mask[sorted(range(score.size), key=lambda i: -abs(score.flat[i]))[:count]] = True
    return mask.reshape(score.shape)


def simulated(steps: int) -> tuple[Array, NDArray[np.bool_]]:
    """Dense steps, steps of the scores with frozen weights, and steps of the kept weights, in float64."""
    weight, mask, sgd = INITIAL.copy(), np.ones(INITIAL.shape, bool), Sgd()
    for step in range(1, steps + 1):
        if step <= DENSE:
            weight = sgd.step(weight, gradient_at(weight))
        elif step < LEARN:
            if step == DENSE + 1:
                frozen, sgd = weight, Sgd()
                score = np.sqrt(6 / 8) * weight / np.abs(weight).max()
            score = sgd.step(score, gradient_at(weight) * frozen * np.sign(score))
            mask = largest(score, KEPT)
            weight = frozen * mask
        else:
            sgd = Sgd() if step == LEARN else sgd
            weight = sgd.step(weight, gradient_at(weight) * mask)
    return weight, mask


def make(optimizer: Any = torch.optim.SGD) -> Made:
    model = nn.Linear(8, 6, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(INITIAL))
    rule = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY} if optimizer is torch.optim.SGD else {}
    stepper = optimizer(model.parameters(), **rule)
    hydra = eq.Hydra(sparsity=1 - KEPT / 48, begin=DENSE / TOTAL, until=LEARN / TOTAL)
    return model, stepper, hydra.attach(model, stepper, total_steps=TOTAL)


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean()


def train(made: Made, steps: int) -> None:
    for _ in range(steps):
        loss_of(made[0]).backward()
        made[1].step()
        made[1].zero_grad()


@pytest.mark.parametrize("steps", [0, DENSE, DENSE + 1, DENSE + 2, LEARN - 1, LEARN, LEARN + 1, TOTAL])
def test_the_three_phases(steps: int) -> None:
    made = make()
    train(made, steps)
    weight, mask = simulated(steps)
    np.testing.assert_array_equal(made[2].masks["weight"].numpy(), mask)
    np.testing.assert_allclose(made[0].weight.detach().numpy(), weight, rtol=1e-10, atol=1e-12)
    assert made[2].active == mask.sum() == (48 if steps <= DENSE else KEPT)
    assert made[2].updates == min(max(steps - DENSE, 0), LEARN - DENSE - 1)


def test_the_gradient_of_the_scores_is_the_straight_through_estimator() -> None:
    """Autograd through mask(|s|)⊙w, with the identity as the derivative of the mask."""
    made = make()
    train(made, DENSE + 3)
    frozen, score = made[2].state_dict()["memory"]["weight"]
    variable = score.clone().requires_grad_()
    mask = torch.from_numpy(largest(score.numpy(), KEPT)).double()
    through = mask + variable.abs() - variable.abs().detach()
    (torch.from_numpy(X) @ (through * frozen).T - torch.from_numpy(Y)).square().mean().backward()
    assert variable.grad is not None
    velocity = made[1].state[made[0].weight]["momentum_buffer"].clone()
    expected = score - RATE * (MOMENTUM * velocity + variable.grad + WEIGHT_DECAY * score)
    train(made, 1)
    torch.testing.assert_close(made[2].state_dict()["memory"]["weight"][1], expected)
    assert torch.equal(made[2].state_dict()["memory"]["weight"][0], frozen)


def test_learned_scores_are_better_than_magnitudes() -> None:
    """On the training loss right after pruning, which the scores minimise."""
    made = make()
    train(made, LEARN - 1)
    dense, _ = simulated(DENSE)
    pruned = torch.from_numpy(dense * largest(dense, KEPT))
    by_magnitude = float((torch.from_numpy(X) @ pruned.T - torch.from_numpy(Y)).square().mean())
    assert loss_of(made[0]).item() < by_magnitude


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("at", [DENSE, DENSE + 4, LEARN - 1, LEARN + 3])
def test_a_resumed_run_and_a_copy_are_the_same_to_the_bit(optimizer: Any, at: int) -> None:
    whole, half, resumed = make(optimizer), make(optimizer), make(optimizer)
    train(whole, TOTAL)
    train(half, at)
    for target, source in zip(resumed, half, strict=True):
        target.load_state_dict(copy.deepcopy(source.state_dict()))  # type: ignore[attr-defined]
    copied = copy.deepcopy(half)
    for made in (resumed, copied):
        train(made, TOTAL - at)
        assert torch.equal(made[0].weight, whole[0].weight)
    assert "weight" not in whole[2].state_dict()["memory"]  # two dense tensors that are no longer needed


def test_scores_of_another_shape_are_refused() -> None:
    made = make()
    train(made, DENSE + 4)
    state = made[2].state_dict()
    state["memory"] = {"weight": state["memory"]["weight"][0]}
    with pytest.raises(
        UserError, match=r'the state of Hydra for "weight" has the shape \(6, 8\) instead of \(2, 6, 8\)'
    ):
        make()[2].load_state_dict(state)


def test_averages_follow_the_masks() -> None:
    made = make()
    ema = eq.EMA(made[0], topology=made[2])
    for _ in range(TOTAL):
        train(made, 1)
        ema.update()
        assert (ema.values["weight"][~made[2].masks["weight"]] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_fan_in": 1}, "min_fan_in=1: HYDRA keeps the best scores of a layer and no minimum"),
        ({"sparsity": 0.5, "pattern": "2:4"}, 'pattern="2:4": HYDRA keeps single weights; use sr-ste'),
        ({"begin": 0.6}, "begin=0.6, until=0.5454"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        eq.Hydra(**options)
    assert message in str(error.value)


def test_attaching_is_refused_if_nothing_would_be_pruned() -> None:
    model = nn.Linear(8, 6)
    sgd, lbfgs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())
    with pytest.raises(UserError, match="Hydra needs total_steps"):
        eq.Hydra().attach(model, sgd)
    with pytest.raises(UserError, match="no step of 5 learns scores, so nothing would be pruned"):
        eq.Hydra().attach(model, sgd, total_steps=5)
    with pytest.raises(UserError, match="HYDRA changes the weights between passes, which LBFGS does not support"):
        eq.Hydra().attach(model, lbfgs, total_steps=100)
    packed = eq.sparse.pack(nn.Sequential(nn.Linear(8, 6)), eq.Static(sparsity=0.9))
    with pytest.raises(UserError, match="HYDRA learns scores of all weights: use masked storage"):
        eq.Hydra().attach(packed, torch.optim.SGD(packed.parameters(), lr=0.1), total_steps=100)
