"""Packed training in float32 and in bf16: accuracy over the same seeds, and seconds of a step.

    python bench/precision.py [--recipes digits digits-set-itop] [--seeds 5] [--set epochs=3 topology.sparsity=0.99 ...]
    python bench/precision.py --steps vgg_c resnet18 [--sparsity 0.9 0.95 0.99] [--repeats 5]

Accuracy: each line is a recipe and a precision, with the mean test accuracy over the seeds, its standard deviation and
all runs. Below them: the mean of the differences between runs of the same seed, and its standard error.

Steps: milliseconds of a training step of 128 images, the best of repeats in turn, next to dense PyTorch in
channels_last, in float32 and under bf16 autocast. With one thread (`OMP_NUM_THREADS=1`) the time is that of the
processor, which other programs on the machine lengthen less than the time on the clock.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models import MODELS
from equipoise.sparse import pack
from equipoise.topology import Static
from equipoise.training import Trainer, apply_overrides, make_recipe, read_recipe

PRECISIONS = ("float32", "bf16")


def accuracy(name: str, precision: str, seed: int, overrides: list[str]) -> float:
    """Test accuracy of a packed run in percent, with the weights as they are (`plain`)."""
    fixed = ["storage=packed", f"precision={precision}", f"seed={seed}", "device=cpu"]
    result = Trainer(make_recipe(apply_overrides(read_recipe(name), [*overrides, *fixed]))).run()
    return 100 * float(result["test"]["plain"]["accuracy"])


def training_step(model: nn.Module, x: Tensor, y: Tensor, autocast: bool = False) -> Callable[[], None]:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def best_milliseconds(work: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Fastest of repeats of each rival, in turn."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats + 1):  # the first is a warm-up
        for name, run in work.items():
            begin = clock()
            run()
            found[name].append(1e3 * (clock() - begin))
    return {name: min(times[1:]) for name, times in found.items()}


def compare_steps(name: str, sparsities: list[float], repeats: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name](classes=10)
    x, y = torch.rand(128, 3, 32, 32), torch.randint(10, (128,))
    dense = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    last = x.to(memory_format=torch.channels_last)
    work = {
        "dense float32": training_step(dense, last, y),
        "dense bf16": training_step(dense, last, y, autocast=True),
    }
    for sparsity in sparsities:
        for precision in PRECISIONS:
            packed = pack(model, Static(sparsity=sparsity), precision)
            work[f"{100 * sparsity:g} % {precision}"] = training_step(packed, x, y)
    times = best_milliseconds(work, repeats)
    for rival, taken in times.items():
        gains = " and ".join(
            f"{times[against] / taken:.1f} × {against}" for against in ("dense float32", "dense bf16")
        )
        print(f"{name}, {rival}: {taken:.0f} ms = {gains}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["digits", "digits-set-itop"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipes, as in `equipoise train --set`")
    parser.add_argument("--steps", nargs="+", default=[], help="time steps of these models instead")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.steps:
        compare_steps(name, arguments.sparsity, arguments.repeats)
    for name in [] if arguments.steps else arguments.recipes:
        runs: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for seed in range(arguments.seeds):
            for precision in PRECISIONS:
                runs[precision].append(accuracy(name, precision, seed, arguments.set))
        for precision, found in runs.items():
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            print(f"{name}, {precision}: {statistics.mean(found):.2f} ± {spread:.2f} %", [round(a, 2) for a in found])
        differences = [half - single for single, half in zip(runs["float32"], runs["bf16"], strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        print(f"{name}, bf16 - float32: {statistics.mean(differences):+.2f} ± {error:.2f} points", flush=True)


if __name__ == "__main__":
    main()
