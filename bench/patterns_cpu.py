"""What structured sparsity gains on this CPU with VGG-C.

    python bench/patterns_cpu.py [--erk] [--sparsity 0.5 0.75 0.9 0.95 0.99] [--pattern unstructured 16x1 n:m fan-in]
        [--repeats 5] [--cpu-time] [--out FILE]

Measured are a training step, inference of 128 images and of one, with the counts and patterns of the study `patterns`
and random masks; with `--erk`, with ERK counts in all layers as in `bench/cpu.py`, which n:m cannot have. Inference is
that of frozen models. Every arm is measured with float32 and with bf16 activations.

All rivals take turns in one process; a number is the median of repeats. Speed-ups are over the fastest dense float32,
in NCHW or channels_last, eager or compiled. On a shared machine, `OMP_NUM_THREADS=1 ... --cpu-time` counts the time of
this process only. `python tools/charts.py` draws the study's accuracy over these speed-ups.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpu import Work, inference, training_step
from equipoise.deploy.benchmark import interleaved
from equipoise.deploy.frozen import freeze
from equipoise.models.vgg import vgg_c
from equipoise.topology import Static
from equipoise.topology.packing import pack

N_TO_M = {0.5: "2:4", 0.75: "1:4", 0.9: "3:32", 0.95: "3:64", 0.99: "1:64"}
DENSE = ("nchw", "channels_last", "nchw compile", "channels_last compile")
PATTERNS = ("unstructured", "n:m", "16x1", "fan-in")
FORMS: dict[str, dict[str, Any]] = {"": {}, " bf16": {"precision": "bf16"}}  # suffixes of arms, options of `pack`
Speeds = dict[str, Any]


def arm(pattern: str, sparsity: float) -> str:
    """Name of the arm in the study."""
    return N_TO_M[sparsity] if pattern == "n:m" else f"{pattern} {100 * sparsity:g} %"


def packed(model: nn.Module, pattern: str, sparsity: float, erk: bool, form: str) -> nn.Module:
    if pattern == "n:m":
        n, m = map(int, N_TO_M[sparsity].split(":"))
        options: dict[str, Any] = {"sparsity": 1 - n / m, "pattern": N_TO_M[sparsity]}
    else:
        names = {"unstructured": "", "16x1": "16x1", "fan-in": "fan_in"}
        options = {"sparsity": sparsity, "pattern": names[pattern], "distribution": "erk" if erk else "er"}
    return pack(model, Static(dense_first=not erk, dense_last=not erk, **options), **FORMS[form])


def rivals(sparsities: list[float], patterns: list[str], x: Tensor, erk: bool) -> dict[str, tuple[nn.Module, Tensor]]:
    model = vgg_c()
    found: dict[str, tuple[nn.Module, Tensor]] = {}
    for name in DENSE:
        layout = torch.channels_last if name.startswith("channels_last") else torch.contiguous_format
        dense = cast(Any, copy.deepcopy(model)).to(memory_format=layout)
        found[name] = torch.compile(dense) if "compile" in name else dense, x.to(memory_format=layout)
    for sparsity, pattern, form in product(sparsities, patterns, FORMS):
        found[arm(pattern, sparsity) + form] = packed(model, pattern, sparsity, erk, form), x
    return found


def work_of(task: str, name: str, model: nn.Module, x: Tensor) -> Work:
    """One call of a task. It also sets the mode of the model, so the work of the next task is made after this one."""
    if task == "train":
        return training_step(model, x)
    return inference(model if name in DENSE else freeze(model), x[:1].contiguous() if task == "infer 1" else x)


def measure(
    sparsities: list[float], patterns: list[str], repeats: int, clock: Callable[[], float], erk: bool
) -> Speeds:
    """Milliseconds and speed-ups of every arm, in training and inference."""
    x = torch.rand(128, 3, 32, 32)
    patterns = [p for p in patterns if not (erk and p == "n:m")]
    models = rivals(sparsities, patterns, x, erk)
    speeds: Speeds = {
        "clock": clock.__name__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for task in ("train", "infer", "infer 1"):
        work = {name: work_of(task, name, *rival) for name, rival in models.items()}
        seconds = interleaved(work, repeats * (10 if task == "infer 1" else 1), clock)
        times = {name: round(1e3 * s, 3) for name, s in seconds.items()}
        dense = min(times[name] for name in DENSE)
        print(f"{task}: dense {dense:.1f} ms")
        for sparsity, form in product(sparsities, FORMS):
            names = [arm(p, sparsity) + form for p in patterns]
            print("  " + ", ".join(f"{name} {dense / times[name]:.2f} x" for name in names), flush=True)
        speeds[task] = {"milliseconds": times, "speedup": {name: dense / ms for name, ms in times.items()}}
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(N_TO_M), choices=list(N_TO_M))
    parser.add_argument("--pattern", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--erk", action="store_true", help="ERK counts in all layers instead of those of the study")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of this process instead of wall time")
    parser.add_argument("--out", type=Path, help="JSON file to write, such as bench/results/patterns-cpu.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    speeds = measure(arguments.sparsity, arguments.pattern, arguments.repeats, clock, arguments.erk)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(speeds, indent=1) + "\n")


if __name__ == "__main__":
    main()
