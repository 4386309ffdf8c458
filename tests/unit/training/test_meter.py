"""Sums over an epoch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.errors import NonFiniteLoss
from equipoise.training.meter import Meter


def batch(labels: list[int], guesses: list[int]) -> tuple[Tensor, Tensor]:
    return torch.nn.functional.one_hot(torch.tensor(guesses), 3).float(), torch.tensor(labels)


def test_means_are_over_images() -> None:
    meter = Meter(torch.device("cpu"))
    meter.add(torch.tensor(2.0), *batch([0, 1, 2], [0, 1, 1]))
    meter.add(torch.tensor(4.0), *batch([2], [2]))
    assert meter.loss == pytest.approx((3 * 2 + 1 * 4) / 4)
    assert meter.accuracy == 3 / 4
    meter.check(0)
    meter.reset()
    meter.add(torch.tensor(5.0), *batch([0], [1]))
    assert (meter.loss, meter.accuracy) == (5.0, 0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_loss_that_is_not_finite_is_named(bad: float) -> None:
    meter = Meter(torch.device("cpu"))
    for loss in [1.0, 1.0, bad, 1.0, float("nan")]:
        meter.add(torch.tensor(loss), *batch([0], [0]))
    with pytest.raises(NonFiniteLoss, match="not finite at batch 3 of epoch 8; the last checkpoint is intact"):
        meter.check(7)


def test_it_continues_from_its_state() -> None:
    meter, other = Meter(torch.device("cpu")), Meter(torch.device("cpu"))
    meter.add(torch.tensor(0.1), *batch([0, 1], [0, 2]))
    other.load_state_dict(meter.state_dict())
    for each in (meter, other):
        each.add(torch.tensor(0.3), *batch([1], [1]))
    assert (meter.loss, meter.accuracy) == (other.loss, other.accuracy)
