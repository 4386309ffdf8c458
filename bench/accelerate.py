"""Ablations of the fast recipe and of its stability: many short runs in few processes, one line for each.

    PYTHONPATH=src python3 bench/accelerate.py GROUP... --data FOLDER --out FILE [--seeds 0 1] [--jobs 3] [--limit 480]

A GROUP is one of the groups of arms below. All arms run with the first seed before the second begins, so that a run
that is cut off still compares all arms. Every result is appended to FILE at once, and what FILE holds is not run again.
Models are scored after the last epoch only. `--jobs` processes share the device and hide each other's compiling, so the
seconds here are no measurements of speed. bench/accelerate_tables.py prints the tables of committed results.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing, nn
from torch.nn import functional as F

from accelerate_tables import read, table
from equipoise.analysis.units import Units, count_units
from equipoise.data.augment import Augment, Moves
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology import ALGORITHMS, GraNet
from equipoise.topology.distribution import DENSITY_RULES, er, erk
from equipoise.training import Trainer, apply_overrides, make_recipe, parts, read_recipe, step
from equipoise.training.evaluate import Score
from equipoise.training.optimizers import OPTIMIZERS, SGDOptions

UNITS_AFTER = (1, 2, 4, 8, 12)  # epochs after which dead units are counted
UNITS_ON = 8  # batches
ARM = list[str]  # overrides of the recipe

RIGL: ARM = ["topology.name=rigl-fast"]
SET: ARM = ["topology.name=set-fast"]
FIXED: ARM = ["topology.min_fan_in=1"]
LOOSE: ARM = ["topology.min_fan_in=0"]
SCALED: ARM = ["rescale"]
GRADIENT: ARM = [
    "correction=agent",
    "correction.gamma=1",
    "correction.coefficient=gradient",
    "correction.mode=running",
]
PAYS: ARM = ["correction.when=pays"]


# Variants that are measured here before they become options


@dataclass(frozen=True, kw_only=True)
class GraNetPower(GraNet):
    """GraNet that prunes on (1 - progress)^power instead of the cubic."""

    power: float = 3.0

    def target(self, layer: SparseWeight, completion: float) -> int:
        left = (layer.initial - layer.final) * (1 - min(completion, 1.0)) ** self.power
        return min(layer.active, layer.final + round(left))


@dataclass(frozen=True, kw_only=True)
class SGDNorm(SGDOptions):
    """SGD with another learning rate for the biases of BatchNorm, by a factor."""

    factor: float = 1.0

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        biases = [m.bias for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        known = {id(bias) for bias in biases}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        decay = self.weight_decay
        return [
            {"params": others, "weight_decay": decay},
            {"params": biases, "weight_decay": decay / self.factor, "factor": self.factor},
        ]

    def make(self, groups: list[dict[str, Any]], lr: Any, *more: Any) -> torch.optim.Optimizer:
        own = [{**group, "lr": lr.clone() if isinstance(lr, torch.Tensor) else lr} for group in groups]
        return super().make(own, lr, *more)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        rate = value * group.get("factor", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class AlternatingFlips(Augment):
    """Every image is flipped in every second epoch; chance decides in which (Jordan 2024, airbench)."""

    def draw(self, count: int, height: int, width: int, seed: int, epoch: int) -> Moves:
        first = super().draw(count, height, width, seed, 0).flips
        return Moves(super().draw(count, height, width, seed, epoch).offsets, first ^ bool(epoch % 2))


def alternate(trainer: Trainer) -> None:
    loader = trainer.parts.train
    loader.augment = AlternatingFlips(**vars(loader.augment))  # type: ignore[union-attr]


@torch.no_grad()
def whiten(trainer: Trainer) -> None:
    """Set filters of the first layer to the principal components of image patches and their negatives."""
    model = trainer.parts.model
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    x, _ = trainer.parts.loaders["train"].batch(0, 0)
    patches = F.unfold(model.normalize(x), first.kernel_size).transpose(1, 2).flatten(0, 1)  # type: ignore[operator]
    directions = torch.linalg.eigh(patches.T.cov()).eigenvectors.T  # unit vectors
    both = torch.cat([directions, -directions])[: len(first.weight)]
    scale = first.weight.flatten(1).norm(dim=1).mean()
    first.weight[: len(both)] = (scale * both).view(-1, *first.weight.shape[1:])


@torch.no_grad()
def rescale(trainer: Trainer) -> None:
    """Multiply initial weights by 1/√density."""
    for layer in trainer.parts.topology.layers:
        layer.parameter.mul_((layer.size / layer.active) ** 0.5)


CHANGES = {"alternate": alternate, "whiten": whiten, "rescale": rescale}  # of a trainer before its first step
step.set_learning_rate = set_learning_rate  # type: ignore[attr-defined]
OPTIMIZERS["sgdnorm"] = SGDNorm
ALGORITHMS["granetpower"] = GraNetPower
DENSITY_RULES["er-erk"] = lambda shape: (er(shape) * erk(shape)) ** 0.5
DENSITY_RULES["er-uniform"] = lambda shape: er(shape) ** 0.5


# Arms

GROUPS: dict[str, tuple[str, dict[str, ARM]]] = {
    # Which remedy stops the collapses of sparse-from-scratch training, and do they come with dead units?
    "stability": (
        "vgg_c-fast",
        {
            "RigL": [*RIGL, *LOOSE],
            "RigL, fan-in 1": [*RIGL, *FIXED],
            "RigL, rescaled": [*RIGL, *LOOSE, *SCALED],
            "RigL, fan-in 1, rescaled": [*RIGL, *FIXED, *SCALED],
            "SET": [*SET, *LOOSE],
            "SET, fan-in 1": [*SET, *FIXED],
            "GraNet": LOOSE,
            "GraNet, fan-in 1": FIXED,
        },
    ),
    # Weaker suspects, and more of a good thing.
    "remedies": (
        "vgg_c-fast",
        {
            "RigL, fan-in 2": [*RIGL, "topology.min_fan_in=2"],
            "RigL, revived": [*RIGL, *LOOSE, "revive"],
            "RigL, no warm-up": [*RIGL, *LOOSE, "schedule.warmup=0"],
            "RigL, warm-up 1/3": [*RIGL, *LOOSE, "schedule.warmup=0.33"],
            "RigL, drop 0.1": [*RIGL, *LOOSE, "topology.drop_fraction=0.1"],
            "RigL, lr 0.05": [*RIGL, *LOOSE, "optimizer.lr=0.05"],
            "RigL, clip 1": [*RIGL, *LOOSE, "clip=1"],
            "RigL, ERK": [*RIGL, *LOOSE, "topology.distribution=erk"],
            "SET, rescaled": [*SET, *LOOSE, *SCALED],
            "SET, fan-in 1, rescaled": [*SET, *FIXED, *SCALED],
            "GraNet, fan-in 2": ["topology.min_fan_in=2"],
            "GraNet, rescaled": [*LOOSE, *SCALED],
        },
    ),
    # What each ingredient of the fast recipe contributes: the recipe without it.
    "ablation": (
        "vgg_c-fast",
        {
            "fast": [],
            "ERK instead of ER": ["topology.distribution=erk"],
            "no warm-up": ["schedule.warmup=0"],
            "piecewise instead of cosine": ["schedule.name=piecewise", "schedule.warmup=0.1667"],
            "RigL instead of GraNet": RIGL,
            "SET instead of GraNet": SET,
            "no minimum fan-in": LOOSE,
            "no exchange of weights": ["topology.drop_fraction=0"],
            "SET-ITOP as published": ["recipe=vgg_c-set-itop"],
            "dense": ["topology=dense"],
        },
    ),
    # What could be added to it, the most plausible first.
    "options": (
        "vgg_c-fast",
        {
            "warm-up 2 epochs": ["schedule.warmup=2"],
            "weight decay 1e-3": ["optimizer.weight_decay=1e-3"],
            "alternating flips": ["alternate"],
            "BatchNorm bias lr x 4": ["optimizer.name=sgdnorm", "optimizer.factor=4"],
            "BatchNorm bias lr x 16": ["optimizer.name=sgdnorm", "optimizer.factor=16"],
            "principal components first": ["topology.dense_first=true", "whiten"],
            "dense first": ["topology.dense_first=true"],
            "dense last": ["topology.dense_last=true"],
            "start 80 %": ["topology.initial_sparsity=0.8"],
            "start 95 %": ["topology.initial_sparsity=0.95"],
            "start dense": ["topology.initial_sparsity=0"],
            "lr 0.2": ["optimizer.lr=0.2"],
            "until 90 %": ["topology.until=0.9"],
            "curve of power 6": ["topology.name=granetpower-fast", "topology.power=6"],
            "linear curve": ["topology.name=granetpower-fast", "topology.power=1"],
            "momentum 0.95": ["optimizer.momentum=0.95"],
            "no Nesterov": ["optimizer.nesterov=false"],
            "warm-up 1/4": ["schedule.warmup=0.25"],
            "ER and ERK": ["topology.distribution=er-erk"],
            "ER and uniform": ["topology.distribution=er-uniform"],
            "every 1 %": ["topology.every=0.01"],
            "every 4 %": ["topology.every=0.04"],
            "drop 0.2": ["topology.drop_fraction=0.2"],
            "EMA 0.99": ["ema=0.99"],
            "EMA 0.998": ["ema=0.998"],
            "batch 64": ["data.batch=64"],
            "no decay of biases and norms": ["optimizer.decay_all=false"],
        },
    ),
    # Does a correction earn its cost? The passes of no arm cost more than 12 epochs without correction. The shorter
    # runs without it tell what the same number of epochs reaches.
    "correction": (
        "vgg_c-fast",
        {
            **{f"no correction, {epochs} epochs": [f"epochs={epochs}"] for epochs in (12, 10, 6)},
            "AGENT, 6 epochs": ["correction=agent", "correction.mode=running", "epochs=6"],
            "gradient coefficient, 6 epochs": [*GRADIENT, "epochs=6"],
            "gradient coefficient in the last 2 of 10 epochs": [*GRADIENT, "correction.from_epoch=8", "epochs=10"],
            "gradient coefficient if it pays, 10 epochs": [*GRADIENT, *PAYS, "epochs=10"],
            "gradient coefficient if it pays, 98 steps each, 10 epochs": [
                *[*GRADIENT, *PAYS],
                *["correction.every=98", "correction.probe=4", "epochs=10"],
            ],
        },
    ),
    # How few epochs reach 80 and 85 %, to choose what bench/cpu_accuracy.py trains: steps of fewer weights are faster.
    "short": (
        "vgg_c-fast",
        {
            **{f"dense, {epochs} epochs": ["topology=dense", f"epochs={epochs}"] for epochs in (2, 3, 4, 5)},
            **{
                f"dense, lr 0.05, {epochs} epochs": ["topology=dense", "optimizer.lr=0.05", f"epochs={epochs}"]
                for epochs in (2, 3, 4)
            },
            **{
                f"{start} to {end} %, {epochs} epochs": [
                    f"topology.initial_sparsity={start / 100}",
                    f"topology.sparsity={end / 100}",
                    f"epochs={epochs}",
                ]
                for start, end, budgets in ((95, 99, (5, 6, 8)), (97, 99, (6, 8)), (95, 98, (4, 5, 6)))
                for epochs in budgets
            },
        },
    ),
    # What a budget buys, next to the references; with `--set topology.sparsity=0.95` at other sparsities.
    "budgets": (
        "vgg_c-fast",
        {
            **{f"fast, {epochs} epochs": [f"epochs={epochs}"] for epochs in (6, 8, 12, 25)},
            **{f"dense, {epochs} epochs": ["topology=dense", f"epochs={epochs}"] for epochs in (6, 8, 12, 25)},
            "SET-ITOP, 50 epochs": ["recipe=vgg_c-set-itop", "epochs=50"],
            "RigL-ITOP, 50 epochs": ["recipe=vgg_c-rigl-itop", "epochs=50"],
        },
    ),
}


class Scored(Trainer):
    """A trainer that scores the model at the end only, counts dead units on its way and may revive them."""

    units: list[tuple[int, dict[str, Units]]]
    counts_units = False
    revives = False

    def evaluate(self, split: str | None = None) -> dict[str, Score]:
        ends = self.epoch + 1 >= self.recipe.epochs
        return super().evaluate(split) if ends else {"plain": Score(0.0, 0.0, 0)}

    def run_arm(self) -> dict[str, Any]:
        self.units = []
        for epoch in range(1, self.recipe.epochs + 1):
            self.run_epoch()
            if self.counts_units and epoch in UNITS_AFTER and self.parts.topology.storage == "masked":
                batches = [self.parts.train.batch(0, k) for k in range(UNITS_ON)]
                self.units.append((epoch, count_units(self.parts.model, self.parts.topology, batches)))
            if self.revives and epoch <= self.recipe.epochs * 0.7:
                revive(self)
        line = self.history[-1]
        return {
            "scores": {name: 100 * score["accuracy"] for name, score in line["scores"].items()},
            "losses": [round(each["train_loss"], 4) for each in self.history],
            "density": line["density"],
            "exploration": line["exploration"],
            "passes": line["passes"],
            "seconds": self.seconds,
            "startup_seconds": self.startup_seconds,
            "units": [
                [epoch, [[u.total, u.without_inputs, u.silent, u.unread] for u in found.values()]]
                for epoch, found in self.units
            ],
        }


@torch.no_grad()
def revive(trainer: Scored) -> None:
    """Reset scale and shift of units whose ReLU never fires on a few batches."""
    model = trainer.parts.model
    fired: dict[nn.Module, torch.Tensor] = {}
    previous: dict[nn.Module, nn.Module] = {}
    chain = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.ReLU)]
    for before, relu in pairwise(chain):
        if isinstance(relu, nn.ReLU):
            previous[relu] = before

    def hear(relu: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        alive = (output > 0).movedim(1, 0).flatten(1).any(1)
        fired[relu] = fired[relu] | alive if relu in fired else alive

    hooks = [relu.register_forward_hook(hear) for relu in previous]
    model.eval()
    for k in range(UNITS_ON):
        model(trainer.parts.train.batch(0, k)[0])
    model.train()
    for hook in hooks:
        hook.remove()
    for relu, alive in fired.items():
        layer = previous[relu]
        layer.bias[~alive] = 0.0  # type: ignore[index]
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight[~alive] = 1.0


def run(job: tuple[str, str, int, ARM, str]) -> dict[str, Any]:
    """Run an arm with a seed."""
    group, arm, seed, extra, root = job
    recipe, arms = GROUPS[group]
    words = [*extra, *arms[arm], f"seed={seed}"]  # what an arm sets counts more than what is set for all
    for word in arms[arm]:
        recipe = word.removeprefix("recipe=") if word.startswith("recipe=") else recipe
    overrides = [w for w in words if w != "revive" and w not in CHANGES and not w.startswith("recipe=")]
    torch._dynamo.reset()
    gc.collect()
    started = time.perf_counter()
    result: dict[str, Any] = {"group": group, "arm": arm, "seed": seed, "recipe": recipe, "overrides": overrides}
    try:
        trainer = Scored(make_recipe(apply_overrides(read_recipe(recipe), [*overrides, f"data.root={root}"])))
        trainer.counts_units = group in ("stability", "remedies")
        trainer.revives = "revive" in words
        for change in (CHANGES[word] for word in words if word in CHANGES):
            change(trainer)
        result |= trainer.run_arm()
    except Exception as error:  # the other arms go on
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    return result | {"wall": time.perf_counter() - started}


def begin_worker() -> None:
    torch.set_num_threads(4)
    warnings.simplefilter("ignore")
    load, seen = parts.load, {}  # type: ignore[attr-defined,var-annotated]

    def load_once(name: str, root: str, validation: int, seed: int, options: Any) -> Any:
        key = repr((name, root, validation, seed if validation else None, options))
        if key not in seen:
            seen[key] = load(name, root, validation, seed, options)
        return seen[key]

    parts.load = load_once  # type: ignore[attr-defined]


def shown(result: dict[str, Any]) -> str:
    """One line: scores, and for each count of units the alive ones of the narrowest layers and the empty ones."""
    head = f"{result['arm']:<32} seed {result['seed']}"
    if "error" in result:
        return f"{head}  {result['error']}"
    scores = "  ".join(f"{name} {value:.2f}" for name, value in result["scores"].items())
    units = "  ".join(
        f"@{epoch}: alive {min(u[0] - u[2] for u in found[:-1])}, empty {sum(u[1] for u in found)}, "
        f"silent {sum(u[2] for u in found)}"
        for epoch, found in result["units"][1::2]
        if found
    )
    return f"{head}  {scores}  {result['wall']:.0f} s  {units}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", choices=list(GROUPS), nargs="+", metavar="GROUP")
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", type=Path, required=True, help="file of results, one JSON object a line")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no arm is begun")
    parser.add_argument("--only", nargs="*", default=[], help="arms with one of these names")
    parser.add_argument("--first", type=int, help="only this number of arms of each group")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every arm, such as model=resnet18")
    arguments = parser.parse_args()
    key = " ".join(arguments.set)
    run_all(arguments, key)
    for group in arguments.groups:
        mine = [r for r in read(arguments.out) if r["group"] == group and r["set"] == key]
        print(f"\n{group}\n\n{table(mine)}")


def run_all(arguments: argparse.Namespace, key: str) -> None:
    """Run the arms that have no result yet, until the time is up."""
    started = time.perf_counter()
    done = {(r["group"], r["arm"], r["seed"], r["set"]) for r in read(arguments.out) if "error" not in r}
    extra = ["checkpoint.best=false", *arguments.set]
    jobs = [
        (group, arm, seed, extra, arguments.data)
        for seed in arguments.seeds
        for group in arguments.groups
        for arm in [*GROUPS[group][1]][: arguments.first]
        if (not arguments.only or arm in arguments.only) and (group, arm, seed, key) not in done
    ]
    print(f"{len(jobs)} runs", flush=True)
    walls: list[float] = [20.0]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context, begin_worker) as pool:
        waiting = iter(jobs)
        running: list[Future[dict[str, Any]]] = []
        while True:
            running = [task for task in running if not take(task, arguments.out, key, walls)]
            left = arguments.limit - (time.perf_counter() - started)
            while len(running) < arguments.jobs and left > max(walls[-3:]) and (job := next(waiting, None)):
                running.append(pool.submit(run, job))
            if not running:
                break
            time.sleep(0.05)
    print(f"{time.perf_counter() - started:.0f} s")


def take(task: Future[dict[str, Any]], out: Path, key: str, walls: list[float]) -> bool:
    """Write and print the result of a run if it has ended."""
    if not task.done():
        return False
    result = task.result() | {"set": key}
    walls.append(result["wall"])
    with out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(shown(result), flush=True)
    return True


if __name__ == "__main__":
    main()
