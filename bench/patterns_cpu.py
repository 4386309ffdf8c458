"""What structured sparsity gains on this CPU with VGG-C.

    python bench/patterns_cpu.py [--erk] [--sparsity 0.5 0.75 0.9 0.95 0.99] [--repeats 5] [--cpu-time] [--out FILE]

Measured are a training step, inference of 128 images and of one, with the counts and patterns of the study `patterns`
and random masks; with `--erk`, with ERK counts in all layers as in `bench/cpu.py`, which n:m cannot have.

All rivals take turns in one process; a number is the median of repeats. Speed-ups are over the faster of dense float32
in NCHW and channels_last. On a shared machine, `OMP_NUM_THREADS=1 ... --cpu-time` counts the time of this process
only. `python tools/charts.py` draws the study's accuracy over these speed-ups.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpu import Clock, Work, inference, milliseconds, training_step
from equipoise.models.vgg import vgg_c
from equipoise.topology import Static
from equipoise.topology.packing import pack

N_TO_M = {0.5: "2:4", 0.75: "1:4", 0.9: "3:32", 0.95: "3:64", 0.99: "1:64"}
PATTERNS = ("unstructured", "n:m", "16x1", "fan-in")
Speeds = dict[str, Any]


def arm(pattern: str, sparsity: float) -> str:
    """Name of the arm in the study."""
    return N_TO_M[sparsity] if pattern == "n:m" else f"{pattern} {100 * sparsity:g} %"


def packed(model: nn.Module, pattern: str, sparsity: float, erk: bool) -> nn.Module:
    if pattern == "n:m":
        n, m = map(int, N_TO_M[sparsity].split(":"))
        options: dict[str, Any] = {"sparsity": 1 - n / m, "pattern": N_TO_M[sparsity]}
    else:
        names = {"unstructured": "", "16x1": "16x1", "fan-in": "fan_in"}
        options = {"sparsity": sparsity, "pattern": names[pattern], "distribution": "erk" if erk else "er"}
    return pack(model, Static(dense_first=not erk, dense_last=not erk, **options))


def rivals(sparsities: list[float], x: Tensor, erk: bool) -> dict[str, tuple[nn.Module, Tensor]]:
    model = vgg_c()
    last = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    found = {"nchw": (model, x), "channels_last": (last, x.to(memory_format=torch.channels_last))}
    patterns = [p for p in PATTERNS if not (erk and p == "n:m")]
    return found | {arm(p, s): (packed(model, p, s, erk), x) for s in sparsities for p in patterns}


def measure(sparsities: list[float], repeats: int, clock: Clock, erk: bool) -> Speeds:
    """Milliseconds and speed-ups of every arm, in training and inference."""
    x, y = torch.rand(128, 3, 32, 32), torch.randint(10, (128,))
    models = rivals(sparsities, x, erk)
    speeds: Speeds = {
        "clock": clock.__name__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    tasks: dict[str, dict[str, Work]] = {
        "train": {name: training_step(net, data, y) for name, (net, data) in models.items()},
        "infer": {name: inference(net, data) for name, (net, data) in models.items()},
        "infer 1": {name: inference(net, data[:1].contiguous()) for name, (net, data) in models.items()},
    }
    for task, work in tasks.items():
        times = milliseconds(work, repeats * (10 if task == "infer 1" else 1), clock)
        dense = min(times["nchw"], times["channels_last"])
        print(f"{task}: dense {dense:.1f} ms")
        for sparsity in sparsities:
            names = [name for p in PATTERNS if (name := arm(p, sparsity)) in times]
            cells = [f"{name} {dense / times[name]:.2f} x" for name in names]
            ratio = times[arm("unstructured", sparsity)] / times[arm("16x1", sparsity)]
            print(f"  {', '.join(cells)}; unstructured / 16x1 {ratio:.2f}", flush=True)
        speeds[task] = {"milliseconds": times, "speedup": {name: dense / ms for name, ms in times.items()}}
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(N_TO_M), choices=list(N_TO_M))
    parser.add_argument("--erk", action="store_true", help="ERK counts in all layers instead of those of the study")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of this process instead of wall time")
    parser.add_argument("--out", type=Path, help="JSON file to write, such as bench/results/patterns-cpu.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    speeds = measure(arguments.sparsity, arguments.repeats, clock, arguments.erk)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(speeds, indent=1) + "\n")


if __name__ == "__main__":
    main()
