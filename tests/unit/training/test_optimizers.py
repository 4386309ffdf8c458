"""SGDW against its formula, and which weights decay."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.errors import UserError
from equipoise.models import small
from equipoise.training.optimizers import (
    OPTIMIZERS,
    SGDW,
    AdamOptions,
    AdamWOptions,
    OptimizerOptions,
    SGDOptions,
    SGDWOptions,
)


def oracle(
    weight: np.ndarray[Any, Any],
    gradients: list[np.ndarray[Any, Any]],
    rates: list[float],
    momentum: float,
    decay: float,
) -> np.ndarray[Any, Any]:
    """w ← w - wd·(lr/lr₀)·w - lr·buf, buf ← μ·buf + g, in float64."""
    w, buffer = weight.astype(np.float64), np.zeros_like(weight, dtype=np.float64)
    for gradient, rate in zip(gradients, rates, strict=True):
        buffer = momentum * buffer + gradient
        w = w - decay * (rate / rates[0]) * w - rate * buffer
    return w


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_sgdw_equals_its_formula_while_the_learning_rate_falls(momentum: float, decay: float) -> None:
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(4, 3)), [rng.normal(size=(4, 3)) for _ in range(9)]
    rates = [0.4] * 3 + [0.04] * 3 + [0.002] * 3
    weight = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = SGDW([weight], lr=rates[0], momentum=momentum, weight_decay=decay)
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    expected = oracle(start, gradients, rates, momentum, decay)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12)


def test_the_decay_is_not_multiplied_by_lr_itself() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGDW([weight], lr=0.01, weight_decay=0.5)
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    optimizer.param_groups[0]["lr"] = 0.002  # a fifth: decays by 0.1
    optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), 0.45, rtol=1e-6)


def test_sgdw_without_decay_is_torchs_sgd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    twin = copy.deepcopy(model)
    pairs = [
        (model, SGDW(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0)),
        (twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)),
    ]
    for _ in range(5):
        x = torch.randn(8, 5)
        for net, optimizer in pairs:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sgdw_leaves_weights_without_gradient_alone_and_runs_closures() -> None:
    moved, still = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = SGDW([moved, still], lr=0.1, weight_decay=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = moved.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss is not None
    assert loss.item() == 1.0
    assert still.item() == 1.0
    assert still not in optimizer.state
    assert moved.item() == pytest.approx(1 - 0.5 - 0.1 * 2)


def test_sgdw_goes_on_from_its_state() -> None:
    first = nn.Parameter(torch.ones(3))
    optimizer = SGDW([first], lr=0.1)
    first.grad = torch.ones(3)
    optimizer.step()
    second = nn.Parameter(first.detach().clone())
    resumed = SGDW([second], lr=0.7)  # the first learning rate comes from the state
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for weight, each in ((first, optimizer), (second, resumed)):
        each.param_groups[0]["lr"] = 0.01
        weight.grad = torch.full((3,), 0.5)
        each.step()
    assert torch.equal(first, second)


def test_sgdw_refuses_a_learning_rate_of_zero() -> None:
    with pytest.raises(UserError, match="lr=0"):
        SGDW([nn.Parameter(torch.ones(1))], lr=0)


def built(options: OptimizerOptions, model: nn.Module) -> torch.optim.Optimizer:
    return options.build(options.groups(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_and_biases_do_not_decay_unless_asked(name: str) -> None:
    model = small()
    norms_and_biases = {id(p) for p in model.parameters() if p.dim() == 1}
    optimizer = built(OPTIMIZERS[name](weight_decay=0.25, decay_all=False), model)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    assert {id(p) for p in others["params"]} == norms_and_biases
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters()} - norms_and_biases
    (everything,) = built(OPTIMIZERS[name](weight_decay=0.25), model).param_groups
    assert everything["weight_decay"] == 0.25
    assert len(everything["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    (group,) = built(SGDOptions(), model).param_groups
    assert len(group["params"]) == 2


def test_options_reach_torchs_optimizers() -> None:
    model = nn.Linear(2, 2)
    sgd = built(SGDOptions(lr=0.3, momentum=0.8, nesterov=True), model)
    assert type(sgd) is torch.optim.SGD
    assert {"lr": 0.3, "momentum": 0.8, "nesterov": True, "weight_decay": 5e-4}.items() <= sgd.param_groups[0].items()
    assert not built(SGDOptions(momentum=0), model).param_groups[0]["nesterov"]  # which torch would refuse
    adam = built(AdamOptions(beta1=0.5, beta2=0.6), model)
    assert type(adam) is torch.optim.Adam
    assert adam.param_groups[0]["betas"] == (0.5, 0.6)
    assert adam.param_groups[0]["weight_decay"] == 0.0
    assert type(built(AdamWOptions(), model)) is torch.optim.AdamW
    assert isinstance(built(SGDWOptions(lr=0.04), model), SGDW)


@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"lr": -1.0}, {"weight_decay": -1.0}, {"momentum": -0.1}, {"momentum": 1.0}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    for cls in (SGDOptions, SGDWOptions):
        with pytest.raises(UserError, match=next(iter(options))):
            cls(**options)
