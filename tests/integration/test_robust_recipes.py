"""Every pipeline of the paper's robust half by name, against its settings written out; and those for the digits."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise.cli import main
from equipoise.correction import SGD, Agent, Loss
from equipoise.data import Augment
from equipoise.models import MODELS
from equipoise.objectives import AdversarialTraining, Standard, Trades
from equipoise.topology import BSRNet
from equipoise.topology.selection import select
from equipoise.training.build_recipe import make_recipe
from equipoise.training.optimizers import SGDWOptions
from equipoise.training.recipe import Recipe
from equipoise.training.recipe_files import apply_overrides, packaged_recipes, read_recipe

NETWORKS = {"vgg16": ("vgg16", 15_302_848, 256), "wrn": ("wrn_28_4", 5_841_840, 256)}  # weights, width of the last
DATA = {"cifar10": 10, "cifar100": 100, "svhn": 10}
OBJECTIVES = {"": Standard(), "-at": AdversarialTraining(), "-trades": Trades()}
SCHEDULES = {  # overlay: lr at epochs 0, 49, 50, 99, 100, 149, 150, 199
    None: (0.04, 0.04, 0.004, 0.004, 0.0002, 0.0002, 0.0002, 0.0002),
    "bsr-own-schedule": (0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001),
}
CORRECTIONS = {None: SGD(), "agent": Agent(gamma=0.1, coefficient=Loss(smoothing=0.3))}
PIPELINES = list(product(NETWORKS, DATA, OBJECTIVES, (0.9, 0.99), CORRECTIONS, SCHEDULES))


def build(network: str, data: str, objective: str, sparsity: float, *overlays: str | None) -> Recipe:
    names = [f"bsr-{network}-{data}{objective}", *(overlay for overlay in overlays if overlay)]
    return make_recipe(apply_overrides(read_recipe(*names), [f"topology.sparsity={sparsity}"]))


def learning_rates(recipe: Recipe) -> tuple[float, ...]:
    steps = 391
    return tuple(
        recipe.optimizer.lr * recipe.schedule.factor(epoch * steps, recipe.epochs, steps)
        for epoch in (0, 49, 50, 99, 100, 149, 150, 199)
    )


def test_there_are_144_pipelines() -> None:
    assert len(PIPELINES) == 144
    assert len({tuple(sorted(build(*pipeline).raw.items(), key=str).__repr__()) for pipeline in PIPELINES}) == 144


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("data", DATA)
def test_every_pipeline_has_the_settings_of_the_paper(network: str, data: str) -> None:
    for pipeline in PIPELINES:
        if pipeline[:2] != (network, data):
            continue
        _, _, objective, sparsity, correction, schedule = pipeline
        for overlays in ((correction, schedule), (schedule, correction)):  # in any order
            recipe = build(network, data, objective, sparsity, *overlays)
            assert recipe.model == NETWORKS[network][0]
            assert recipe.data.name == data
            assert (recipe.data.batch, recipe.epochs) == (128, 200)
            assert not recipe.data.normalize  # inputs in [0, 1]
            assert recipe.data.augment == Augment(crop=False, shift=0.1, flip=True)
            assert recipe.topology == BSRNet(sparsity=sparsity, distribution="bsr", noise=1e-6)
            assert recipe.objective == OBJECTIVES[objective]
            assert recipe.correction == CORRECTIONS[correction]
            assert learning_rates(recipe) == pytest.approx(SCHEDULES[schedule])
            decay = 1e-3 if data == "cifar10" and objective == "-at" else 5e-4
            lr = SCHEDULES[schedule][0]
            assert recipe.optimizer == SGDWOptions(lr=lr, momentum=0.9, weight_decay=decay, decay_all=True)
            assert recipe.full_pass == "clean"


def test_attacks_and_losses_are_those_of_the_paper() -> None:
    at, trades = OBJECTIVES["-at"], OBJECTIVES["-trades"]
    assert isinstance(at, AdversarialTraining)
    assert isinstance(trades, Trades)
    for attack in (at.attack, trades.attack):
        assert (attack.norm, attack.eps, attack.step_size, attack.steps) == ("linf", 8 / 255, 2 / 255, 10)
    assert (at.attack.start, at.attack.loss, at.clean_fraction) == ("uniform", "ce", 0)
    assert (trades.attack.start, trades.attack.loss, trades.beta) == ("normal", "kl", 6)


def chosen_shapes(model: nn.Module, topology: BSRNet) -> dict[str, tuple[int, ...]]:
    found = select(model, topology.include, topology.exclude, topology.dense_first, topology.dense_last)
    return {name: tuple(weight.shape) for name, weight in found.items()}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("sparsity", [0.9, 0.99])
@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_the_budget_is_the_density_of_all_weights(network: str, sparsity: float, data: str) -> None:
    """Every layer is sparse, and the initial densities are BSR-Net's: the first and the last .6, the largest p/2.

    At 99 % on CIFAR-100 these would be more than the budget, where BSR-Net starts above it; here none ever does.
    """
    recipe = build(network, data, "-at", sparsity)
    _, weights, width = NETWORKS[network]
    weights += width * (DATA[data] - 10)
    with torch.device("meta"):
        model = MODELS[recipe.model](classes=DATA[data])
    topology = recipe.topology
    assert isinstance(topology, BSRNet)
    shapes = chosen_shapes(model, topology)
    initial, final = topology.initial_counts(shapes, model), topology.final_counts(shapes, model)
    assert sum(math.prod(shape) for shape in shapes.values()) == weights
    assert abs(sum(final.values()) - (1 - sparsity) * weights) <= len(shapes)
    assert sum(initial.values()) <= sum(final.values())
    if data == "cifar100" and sparsity == 0.99:
        assert initial == final
        return
    densities = [initial[name] / math.prod(shape) for name, shape in shapes.items()]
    assert densities[0] == pytest.approx(0.6, abs=1e-3)
    assert densities[-1] == pytest.approx(0.6, abs=1e-3)
    largest = max(shapes, key=lambda name: math.prod(shapes[name]))
    assert initial[largest] / math.prod(shapes[largest]) == pytest.approx((1 - sparsity) / 2, rel=1e-3)


# --- the list is one that can be read


def test_the_list_has_every_recipe_once_under_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "recipes"])
    _, *lines = capsys.readouterr().out.splitlines()
    for name, comment in packaged_recipes().items():
        family, _, description = comment.partition(": ")
        (number,) = (i for i, line in enumerate(lines) if line.split()[0] == name)
        assert lines[number].endswith(description)
        headings = [line.strip() for line in lines[:number] if line.startswith("  ") and not line.startswith("    ")]
        assert headings[-1] == family
        assert len(family) < 50
    assert all(len(line) <= 130 for line in lines)
    assert [line.strip() for line in lines if line.startswith("  overlays")] == [
        "overlays, to be given after a recipe"
    ]


# --- seconds on the digits


@pytest.mark.parametrize(
    "words",
    [
        ["digits-bsr"],
        ["digits-bsr-at"],
        ["digits-bsr-trades"],
        ["digits-bsr-at", "agent"],
        ["digits-bsr-at", "objective=mart"],
        ["digits-bsr-at", "objective=mixed"],
    ],
    ids=" ".join,
)
def test_a_digits_recipe_trains(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One epoch of each, of the six or ten that they have: it learns and keeps its density."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *words, "epochs=1", "ema=0", "bn_recalibration_batches=1", "--out", str(tmp_path / "run")])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "density 10.00%" in out
    test = next(line for line in out.splitlines() if line.startswith("test: plain"))
    assert float(test.split()[2]) > 60
