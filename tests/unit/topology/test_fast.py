"""Fast training in a custom loop, against formulas in numpy and against the recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.training.build_recipe import make_recipe
from equipoise.training.recipe_files import read_recipe

SHAPES = [(24, 30), (40, 24), (10, 40)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for outputs, inputs in SHAPES:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def er_counts(density: float) -> np.ndarray:
    """Counts in proportion to inputs + outputs, at most the size of the layer."""
    sizes = np.array([a * b for a, b in SHAPES], float)
    ends = np.array([a + b for a, b in SHAPES], float)
    dense = np.zeros(len(SHAPES), bool)
    while True:
        scale = (density * sizes.sum() - sizes[dense].sum()) / ends[~dense].sum()
        counts = np.where(dense, sizes, scale * ends)
        if (counts <= sizes).all():
            return counts
        dense |= counts > sizes


@pytest.mark.parametrize(("sparsity", "start"), [(0.96, 0.6), (0.9, 0.0)])
def test_weights_and_learning_rate_follow_the_formulas(sparsity: float, start: float) -> None:
    model, steps = network(), 200
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    topology, schedule = eq.fast(model, optimizer, sparsity=sparsity, steps=steps)
    first, last = er_counts(1 - start), er_counts(1 - sparsity)
    updates = np.arange(4, 150, 4)  # every 2 % of 200 steps, until 75 %
    warmup = steps / 6
    inputs = torch.randn(64, 30)
    for step in range(steps):
        rise = min(1, (step + 1) / warmup)
        cosine = (1 + np.cos(np.pi * max(0, step - warmup) / (steps - warmup))) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * rise * cosine)
        done = updates[updates <= step]
        left = (1 - done[-1] / updates[-1]) ** 3 if len(done) else 1.0
        expected = last + (first - last) * left
        assert [layer.active for layer in topology.layers] == pytest.approx(expected, abs=1.6)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    assert topology.active == round((1 - sparsity) * topology.size)
    assert topology.updates == len(updates)


def test_the_recipe_trains_with_the_same_topology_and_schedule() -> None:
    recipe = make_recipe(read_recipe("vgg_c-fast"))
    epochs, batches = recipe.epochs, 5
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    topology, schedule = eq.fast(model, optimizer, sparsity=0.99, steps=epochs * batches)
    assert topology.algorithm == recipe.topology
    for step in range(epochs * batches):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(recipe.schedule.factor(step, epochs, batches))
        optimizer.step()
        schedule.step()


def test_options_reach_the_topology() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    topology, _ = eq.fast(model, optimizer, sparsity=0.5, steps=100, exclude="0", seed=3, every=10)
    assert [layer.name for layer in topology.layers] == ["2.weight", "4.weight"]
    assert topology.algorithm == eq.GraNet.fast(sparsity=0.5, exclude=("0",), seed=3, every=10)
