"""What structured sparsity gains on this CPU with VGG-C, and the chart of accuracy against speed-up.

    python bench/patterns_cpu.py [--erk] [--sparsity 0.5 0.75 0.9 0.95 0.99] [--repeats 5] [--cpu-time] [--out FILE]
    python bench/patterns_cpu.py --chart          # docs/patterns.svg from committed results

Measured are a training step, inference of 128 images and of one, with the counts and patterns of the study `patterns`
and random masks; with `--erk`, with ERK counts in all layers as in `bench/cpu.py`, which n:m cannot have. Inference is
that of frozen models. Every arm is measured with float32 and with bf16 activations.

All rivals take turns in one process; a number is the median of repeats. Speed-ups are over the faster of dense float32
in NCHW and channels_last. On a shared machine, `OMP_NUM_THREADS=1 ... --cpu-time` counts the time of this process
only. The chart shows the study's accuracy (results/patterns) over these speed-ups.
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
from equipoise.display.figures import COLOURS
from equipoise.errors import UserError
from equipoise.models.vgg import vgg_c
from equipoise.studies.compare import spread_of
from equipoise.studies.reading import read_results
from equipoise.studies.results import Question, Study
from equipoise.topology import Static
from equipoise.topology.packing import pack

ROOT = Path(__file__).parents[1]
SPEEDS, RESULTS, CHART = (ROOT / name for name in ("bench/results/patterns-cpu.json", "results", "docs/patterns.svg"))
N_TO_M = {0.5: "2:4", 0.75: "1:4", 0.9: "3:32", 0.95: "3:64", 0.99: "1:64"}
LAYOUTS = ("nchw", "channels_last")  # of the dense model
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
    last = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    found = dict(zip(LAYOUTS, ((model, x), (last, x.to(memory_format=torch.channels_last))), strict=True))
    for sparsity, pattern, form in product(sparsities, patterns, FORMS):
        found[arm(pattern, sparsity) + form] = packed(model, pattern, sparsity, erk, form), x
    return found


def measure(sparsities: list[float], repeats: int, clock: Callable[[], float], erk: bool) -> Speeds:
    """Milliseconds and speed-ups of every arm, in training and inference."""
    x = torch.rand(128, 3, 32, 32)
    patterns = [p for p in PATTERNS if not (erk and p == "n:m")]
    models = rivals(sparsities, patterns, x, erk)
    speeds: Speeds = {
        "clock": clock.__name__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    fast = {name: (net if name in LAYOUTS else freeze(net), data) for name, (net, data) in models.items()}
    tasks: dict[str, dict[str, Work]] = {
        "train": {name: training_step(net, data) for name, (net, data) in models.items()},
        "infer": {name: inference(net, data) for name, (net, data) in fast.items()},
        "infer 1": {name: inference(net, data[:1].contiguous()) for name, (net, data) in fast.items()},
    }
    for task, work in tasks.items():
        seconds = interleaved(work, repeats * (10 if task == "infer 1" else 1), clock)
        times = {name: round(1e3 * s, 3) for name, s in seconds.items()}
        dense = min(times[name] for name in LAYOUTS)
        print(f"{task}: dense {dense:.1f} ms")
        for sparsity, form in product(sparsities, FORMS):
            names = [arm(p, sparsity) + form for p in patterns]
            ratio = times[arm("unstructured", sparsity) + form] / times[arm("16x1", sparsity) + form]
            cells = [f"{name} {dense / times[name]:.2f} x" for name in names]
            print(f"  {', '.join(cells)}; unstructured / 16x1 {ratio:.2f}", flush=True)
        speeds[task] = {"milliseconds": times, "speedup": {name: dense / ms for name, ms in times.items()}}
    return speeds


def points(study: Study, speedups: dict[str, float], pattern: str, suffix: str) -> list[tuple[float, float, str]]:
    """Speed-up, mean accuracy in percent and sparsity of the arms of a pattern that have both."""
    found = []
    for sparsity in N_TO_M:
        name = arm(pattern, sparsity)
        accuracy = spread_of(study.results.get(name + suffix, ()), Question(metric="accuracy"))
        if accuracy is not None and name in speedups:
            found.append((speedups[name], 100 * accuracy.mean, f"{100 * sparsity:g} %"))
    return found


def draw(path: Path) -> None:
    """Draw accuracy over speed-up, one line for each pattern; an open mark is AGENT."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "equipoise"
    from matplotlib import pyplot as plt

    speeds = json.loads(SPEEDS.read_text())
    found = [study for study in read_results(RESULTS).studies if study.name == "patterns"]
    if not found:
        raise UserError(
            f"there are no results of the study in {RESULTS}/patterns; `equipoise study patterns` runs it"
        )
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for axis, (task, label) in zip(axes, {"train": "training step", "infer": "inference"}.items(), strict=True):
        for (pattern, colour), suffix in product(zip(PATTERNS, COLOURS, strict=False), ("", " AGENT")):
            shown = points(found[0], speeds[task]["speedup"], pattern, suffix)
            marks = {"marker": "s", "mfc": "none", "linestyle": ":"} if suffix else {"marker": "o"}
            axis.plot(
                [x for x, _, _ in shown], [y for _, y, _ in shown], color=colour, label=pattern + suffix, **marks
            )
            for x, y, text in [] if suffix else shown:
                axis.annotate(text, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set_xlabel(f"{label}: times as fast as dense float32 on a CPU")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy after 8 epochs, %")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(N_TO_M), choices=list(N_TO_M))
    parser.add_argument("--erk", action="store_true", help="ERK counts in all layers instead of those of the study")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of this process instead of wall time")
    parser.add_argument("--out", type=Path, help=f"JSON file to write, such as {SPEEDS.relative_to(ROOT)}")
    parser.add_argument("--chart", action="store_true", help=f"draw {CHART.relative_to(ROOT)} and measure nothing")
    arguments = parser.parse_args()
    if arguments.chart:
        draw(CHART)
        return
    torch.manual_seed(0)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    speeds = measure(arguments.sparsity, arguments.repeats, clock, arguments.erk)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(speeds, indent=1) + "\n")


if __name__ == "__main__":
    main()
