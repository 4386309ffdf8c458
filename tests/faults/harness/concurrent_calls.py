"""Threads that call one model at the same time, for a process whose kernels have ThreadSanitizer.

    python -m harness.concurrent_calls COUNT SEED [canary]

Prints one line of JSON: the number of runs, and failures. In each run several threads call one packed or frozen model
with inputs of different sizes, or train copies of one model. Their results must be those of one thread, bit for bit.
The word `canary` adds two threads that write to the same taps on purpose.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from random import Random

import torch
from torch import Tensor, nn

from equipoise.deploy.frozen import freeze
from equipoise.kernels import library
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.taps import Pattern
from equipoise.topology.packing import pack
from sparse_helpers import masks

CALLS = 4  # of each thread
THREADS = 3


def network(width: int, stride: int) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 6, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return pack(model, masks(model, 0.3))


def evaluate(model: nn.Module, x: Tensor, named: bool) -> Tensor:
    with torch.no_grad():
        return model(input=x) if named else model(x)


def train(model: nn.Module, x: Tensor, named: bool) -> Tensor:
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run(random: Random) -> list[str]:
    """Run threads once; return what was wrong."""
    torch.manual_seed(random.randrange(2**31))
    kind = random.choice(["packed", "frozen", "training"])
    model = network(random.randint(4, 24), random.randint(1, 2)).train(kind == "training")
    work = train if kind == "training" else evaluate
    named = random.random() < 0.3
    shared = freeze(model) if kind == "frozen" else model
    sizes = [(random.randint(1, 33), 3, random.randint(4, 16), random.randint(4, 16)) for _ in range(THREADS)]
    inputs = [torch.randn(size) for size in sizes]
    models = [copy.deepcopy(model) if kind == "training" else shared for _ in range(THREADS)]
    wanted = [work(copy.deepcopy(model) if kind == "training" else shared, x, named) for x in inputs]
    wrong: list[str] = []

    def calls(number: int) -> None:
        try:
            for call in range(1 if kind == "training" else CALLS):
                if not torch.equal(work(models[number], inputs[number], named), wanted[number]):
                    wrong.append(f"{kind}: call {call} with {sizes[number]} differs")
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def race() -> None:
    """Two threads write to the same taps."""
    with Pattern(ConvShape(64, 64), torch.arange(4096)).lend() as lent:
        taps = lent  # kept beyond the loan, as no caller may

    def write() -> None:
        for _ in range(50):
            taps.set_weights(torch.ones(4096))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    assert library.available(), library.reason()
    library.threads = lambda: 2  # type: ignore[assignment]
    failures = [
        f"concurrent run {number} of seed {seed}, {line}"
        for number in range(count)
        for line in run(Random(f"{seed} {number}"))
    ]
    if "canary" in sys.argv:
        race()
    print(json.dumps({"calls": {"concurrent runs": count}, "failures": failures}))


if __name__ == "__main__":
    main()
