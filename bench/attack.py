"""Cost of PGD-10 against its 10 forward-backward passes: what the attack adds to the model's own work.

    python bench/attack.py [--batch 32] [--rounds 9] [--norm linf] [--device cpu]

Three things are timed in turn, round after round, so that a machine that slows down slows all of them; medians
are compared. `passes`: ten times forward, and backward to the input only, in eval mode with frozen parameters.
`attack`: `PGD.perturb` from a uniform start. `naive`: the same passes with weight gradients computed as well,
which is what an attack through `loss.backward()` pays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.objectives.attack import PGD, under_attack

STEPS = 10
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)  # 0: pooling


def vgg16() -> nn.Module:
    """VGG-16 as BSR-Net has it: 13 convolutions with BatchNorm, three linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG16:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *head)


def input_passes(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Ten forward-backward passes for the input's gradient alone."""
    with under_attack(model), torch.enable_grad():
        for _ in range(STEPS):
            image = x.detach().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(image), y, reduction="sum"), image)


def full_passes(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Ten forward-backward passes that compute the weights' gradients too."""
    model.eval()
    for _ in range(STEPS):
        image = x.detach().requires_grad_()
        model.zero_grad()
        F.cross_entropy(model(image), y, reduction="sum").backward()
    model.train()


def seconds(task: Callable[[], object], device: str) -> float:
    """Processor time of one call, which other programs do not lengthen; on a GPU, wall time until it is done."""
    if device == "cpu":
        begin = time.process_time()
        task()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    task()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--norm", choices=("linf", "l2"), default="linf")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    model = vgg16().to(chosen.device)
    x, y = torch.rand(chosen.batch, 3, 32, 32), torch.randint(10, (chosen.batch,))
    x, y = x.to(chosen.device), y.to(chosen.device)
    generator = torch.Generator(chosen.device).manual_seed(0)
    attack = PGD(chosen.norm, steps=STEPS)
    tasks: dict[str, Callable[[], object]] = {
        "passes": lambda: input_passes(model, x, y),
        "attack": lambda: attack.perturb(model, x, y, generator),
        "naive": lambda: full_passes(model, x, y),
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    order = list(tasks)
    for round_number in range(chosen.rounds + 1):
        for name in order:
            spent = seconds(tasks[name], chosen.device)
            if round_number:  # the first warms up
                times[name].append(spent)
        order = order[1:] + order[:1]  # whatever a task leaves in the caches, each of the others meets it
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    for name, middle in medians.items():
        print(f"{name:7} {1000 * middle:9.1f} ms   {middle / medians['passes']:.3f} of the passes")


if __name__ == "__main__":
    main()
