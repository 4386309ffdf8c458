"""CPU benchmark: packed models with the sparse kernels against dense PyTorch, in one table.

    python bench/cpu.py [--models vgg_c resnet18] [--sparsity 0.9 0.95 0.99] [--repeats 7] [--cpu-time]

Every number is the median of repeats that were interleaved with those of its rivals in the same run, so that a
busy moment of the machine meets all of them. The dense rival is the faster of NCHW and channels_last. On a machine
that others use too, `OMP_NUM_THREADS=1 ... --cpu-time` counts the time of this process alone.
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

from equipoise.models.resnet import resnet18
from equipoise.models.vgg import vgg_c
from equipoise.sparse.frozen import freeze
from equipoise.sparse.pack import pack
from equipoise.topology.distribution import active_counts

MODELS: dict[str, Callable[[], nn.Module]] = {"vgg_c": vgg_c, "resnet18": resnet18}
TARGETS = {
    ("vgg_c", "train"): {0.9: 2.5, 0.95: 4.0, 0.99: 9.0},
    ("vgg_c", "infer 128"): {0.9: 2.0, 0.95: 3.0, 0.99: 9.0},
    ("vgg_c", "infer 1"): {0.9: 3.0, 0.95: 4.5, 0.99: 9.0},
}
Work = Callable[[], object]


def random_masks(model: nn.Module, sparsity: float) -> dict[str, Tensor]:
    """Masks with ERK counts, active places at random."""
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    counts = active_counts("erk", {name: tuple(p.shape) for name, p in weights.items()}, 1 - sparsity)
    masks = {}
    for name, weight in weights.items():
        flat = torch.zeros(weight.numel(), dtype=torch.bool)
        flat[torch.randperm(weight.numel())[: counts[name]]] = True
        masks[name] = flat.view(weight.shape)
    return masks


def training_step(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def inference(model: nn.Module, x: Tensor) -> Work:
    model = freeze(model)

    def run() -> None:
        with torch.inference_mode():
            model(x)

    return run


def jobs(model: nn.Module, sparsities: list[float], batch: int) -> dict[str, dict[str, Work]]:
    """By task, then by rival: what to time."""
    x, y = torch.rand(batch, 3, 32, 32), torch.randint(10, (batch,))
    packed = {}
    for sparsity in sparsities:
        masks = random_masks(model, sparsity)
        packed[f"{sparsity:g}"] = pack(model, masks)
    last = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    rivals = {"nchw": (model, x), "channels_last": (last, x.to(memory_format=torch.channels_last))}
    rivals |= {name: (net, x) for name, net in packed.items()}
    return {
        "train": {name: training_step(net, data, y) for name, (net, data) in rivals.items()},
        f"infer {batch}": {name: inference(net, data) for name, (net, data) in rivals.items()},
        "infer 1": {name: inference(net, data[:1].contiguous()) for name, (net, data) in rivals.items()},
    }


def interleaved(work: dict[str, Work], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds of each, the rivals taking turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(repeats + 1):
        for name, run in work.items():
            begin = clock()
            run()
            if round_:  # the first round warms caches and buffers
                times[name].append(1e3 * (clock() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def report(name: str, task: str, sparsities: list[float], times: dict[str, float]) -> None:
    dense = min(times["nchw"], times["channels_last"])
    print(f"| {name} {task} | nchw {times['nchw']:.1f}, channels_last {times['channels_last']:.1f} |", end="")
    for sparsity in sparsities:
        mine = times[f"{sparsity:g}"]
        target = TARGETS.get((name, task), {}).get(sparsity)
        print(f" {mine:.1f} ms = {dense / mine:.1f}x" + (f" (at least {target:g})" if target else "") + " |", end="")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    parser.add_argument("--tasks", nargs="+", default=["train", "infer 128", "infer 1"])
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process instead of the wall's")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print("| task | dense, ms |" + "".join(f" {100 * s:g} % |" for s in arguments.sparsity))
    for name in arguments.models:
        for task, work in jobs(MODELS[name](), arguments.sparsity, batch=128).items():
            if task in arguments.tasks:
                repeats = arguments.repeats * (10 if task == "infer 1" else 1)
                report(name, task, arguments.sparsity, interleaved(work, repeats, clock))


if __name__ == "__main__":
    main()
