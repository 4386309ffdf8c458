"""Wall time to an accuracy on CPU cores: the fast recipe in packed storage against dense training, VGG-C on CIFAR-10.

    PYTHONPATH=src python bench/cpu_accuracy.py --data FOLDER --out FILE --arm sparse 8 --arm float32 3 --arm bf16 3

An arm is `sparse`, `published`, `float32` or `bf16`, a number of epochs, and overrides of the recipe, such as
`topology.initial_sparsity=0.95`. Sparse arms run `vgg_c-fast`, published ones `vgg_c-set-itop`, both packed. Dense arms
are a plain PyTorch loop on a channels_last model with a fused optimizer and the same data and schedule, so that the
rival is not slowed down by ours. Each arm has a process of its own, models are scored after the last epoch only, and
every result is appended to FILE at once. `seconds` are those of the steps, `process` those of the whole process, with
start-up and the evaluation; only `processor_seconds` do not grow if other programs share the cores. `--steps N` stops
each arm after N steps: times without an accuracy, from which `steps_per_epoch` gives those of the whole training.
tools/cpu_times.py reads FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from cpu import processor
from equipoise.data import Loader, load
from equipoise.training import Recipe, Trainer, apply_overrides, make_recipe, read_recipe
from equipoise.training.build_model import make_model
from equipoise.training.evaluate import Score, score
from equipoise.training.loaders import scoring_loaders, training_loader
from equipoise.training.precision import autocast
from equipoise.world import ALONE

CPU = torch.device("cpu")
SPARSE = {"sparse": "vgg_c-fast", "published": "vgg_c-set-itop"}  # recipes


class Enough(Exception):
    """The number of steps that were asked for has been taken."""


class Clock:
    """Times of the first and of the last step.

    Args:
        limit: Number of steps after which `tick` raises `Enough`; 0 for none.

    `per_epoch` is for the function that trains to set.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.steps = limit, 0
        self.per_epoch = 0
        self.first = self.last = (0.0, 0.0)

    def tick(self) -> None:
        """Note the time, before every step and after the last one."""
        self.last = (time.perf_counter(), time.process_time())
        self.first = self.last if not self.steps else self.first
        self.steps += 1
        if self.limit and self.steps > self.limit:
            raise Enough


class Timed(Trainer):
    """A trainer that tells a clock its steps and scores the model at the end only."""

    clock: Clock

    def take_step(self) -> None:
        self.clock.tick()
        super().take_step()

    def evaluate(self, split: str | None = None) -> dict[str, Score]:
        if self.epoch + 1 < self.recipe.epochs:
            return {"plain": Score(0.0, 0.0, 0)}
        self.clock.tick()
        return super().evaluate(split)


def train_sparse(recipe: Recipe, clock: Clock) -> float:
    """Train the recipe; return the test accuracy."""
    trainer = Timed(recipe)
    trainer.clock = clock
    clock.per_epoch = len(trainer.parts.train)
    while trainer.epoch < recipe.epochs:
        trainer.run_epoch()
    return float(trainer.history[-1]["scores"]["plain"]["accuracy"])


def train_dense(recipe: Recipe, clock: Clock) -> float:
    """Train the model of the recipe without equipoise's step; return the test accuracy."""
    splits = load(recipe.data.name, recipe.data.root, 0, recipe.seed, recipe.data_options)
    torch.manual_seed(recipe.seed)
    model = make_model(recipe, splits).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train = training_loader(recipe, splits.train, CPU, ALONE)
    assert isinstance(train, Loader)
    clock.per_epoch = len(train)
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": recipe.optimizer.weight_decay, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.lr, **options)
    model.train()
    for epoch in range(recipe.epochs):
        for i, (x, y) in enumerate(train.epoch(epoch)):
            clock.tick()
            factor = recipe.schedule.factor(epoch * len(train) + i, recipe.epochs, len(train))
            optimizer.param_groups[0]["lr"] = recipe.optimizer.lr * factor
            with autocast(recipe.precision, CPU):
                loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    clock.tick()
    test = scoring_loaders(recipe, splits, CPU, ALONE)["test"]
    return score(model, test.epoch(0), lambda: autocast(recipe.precision, CPU)).accuracy


def child(words: list[str], steps: int) -> dict[str, Any]:
    """Train one arm."""
    kind, epochs, *overrides = words
    own = ["storage=packed"] if kind in SPARSE else ["topology=dense", f"precision={kind}"]
    overrides = [*own, "device=cpu", f"epochs={epochs}", *overrides]
    recipe = make_recipe(apply_overrides(read_recipe(SPARSE.get(kind, "vgg_c-fast")), overrides))
    clock, accuracy = Clock(steps), None
    with contextlib.suppress(Enough):
        accuracy = (train_sparse if kind in SPARSE else train_dense)(recipe, clock)
    return {
        "accuracy": accuracy,
        "steps": clock.steps - 1,
        "steps_per_epoch": clock.per_epoch,
        "seconds": clock.last[0] - clock.first[0],
        "processor_seconds": clock.last[1] - clock.first[1],
        "threads": torch.get_num_threads(),
        "cpu": processor(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", type=Path, help="file of results, one JSON object a line")
    parser.add_argument("--arm", nargs="+", action="append", default=[], metavar="KIND EPOCHS [OVERRIDE]")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(child(arguments.arm[0], arguments.steps)))
        return
    for seed in arguments.seeds:
        for arm in arguments.arm:
            words = [*arm, f"seed={seed}", f"data.root={arguments.data}"]
            command = [sys.executable, __file__, "--child", "--threads", str(arguments.threads)]
            command += ["--steps", str(arguments.steps), "--arm", *words]
            load_before, started = os.getloadavg()[0], time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            process = time.perf_counter() - started
            result = {"arm": ", ".join(arm), "seed": seed, **json.loads(done.stdout.splitlines()[-1])}
            result |= {"process": process, "load_before": load_before, "load_after": os.getloadavg()[0]}
            print(json.dumps(result), flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
