"""Convolutional networks on several processes: equal to one process in float64 if no max-pool window has a tie."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import equipoise as eq
from distributed_helpers import Processes, assert_equal_runs, double_trainer, found, normed, processes
from equipoise.models import MODELS
from equipoise.world import ALONE, World


@pytest.fixture
def two() -> Processes:
    return processes(2)


def train_without_ties(world: World, changes: dict[str, Any]) -> dict[str, Any]:
    """Train on the digits with an offset for each pixel.

    The digits have 17 grey levels and empty borders. Filters with few active weights therefore have equal values in one
    max-pool window, and rounding would decide between them.
    """
    offset = 0.05 * torch.rand(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with mock.patch.dict(MODELS, {"normed": normed}):
        trainer = double_trainer(world, {"data": {"name": "digits", "batch": 90}, "ema": 0, "epochs": 1, **changes})
        trainer.parts.model.register_forward_pre_hook(lambda _, arguments: (arguments[0] + offset,))
        trainer.run()
    return found(trainer)


RIGL = {"name": "rigl", "sparsity": 0.95, "every": 4, "until": 1.0}
GRANET = {"name": "granet", "sparsity": 0.95, "every": 3}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": "normed", "topology": RIGL}, id="rigl"),
        pytest.param({"model": "normed", "topology": GRANET, "correction": "agent"}, id="granet, agent"),
        pytest.param({"model": "small", "topology": RIGL}, id="catalogue", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one_in_float64(two: Processes, changes: dict[str, Any]) -> None:
    changes = {"storage": "masked", **changes}
    several, one = two(train_without_ties, changes), train_without_ties(ALONE, changes)
    assert one["updates"] >= 3
    assert_equal_runs(several, one, 1e-10)


def growth_at_a_tie(nudged: int | None) -> float:
    """Gradient of an inactive weight in a filter with equal values at both indices of a max-pool window.

    Args:
        nudged: Index whose value is raised by one unit in the last place; `None` for an exact tie.
    """
    model = nn.Sequential(nn.Conv1d(1, 1, 2, stride=2, bias=False), nn.MaxPool1d(2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = eq.RigL(sparsity=0.5, distribution="uniform", every=1, until=1.0).attach(model, optimizer, 4)
    (layer,) = topology.layers
    seen, unseen = (layer.mask().reshape(-1) == state for state in (True, False))
    with torch.no_grad():
        model[0].weight[layer.mask()] = 1.0
    x = torch.empty(2, 2, dtype=torch.float64)  # one row for each index of the window, one column for each weight
    x[:, seen], x[:, unseen] = 0.3, torch.tensor([[5.0], [-7.0]], dtype=torch.float64)
    if nudged is not None:
        x[nudged, seen] = torch.nextafter(x[nudged, seen], torch.tensor(1.0, dtype=torch.float64))
    model(x.view(1, 1, 4)).sum().backward()
    assert layer.growth is not None
    return float(layer.growth.reshape(-1)[unseen])


def test_rounding_decides_growth_at_a_tie() -> None:
    """No implementation can avoid it: one unit in the last place of an activation moves the growth gradient by 12."""
    assert growth_at_a_tie(None) == growth_at_a_tie(0) == 5.0
    assert growth_at_a_tie(1) == -7.0
