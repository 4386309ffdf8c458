"""What masking costs per training step and what a topology update costs, next to rigl-torch and sparsimony.

    python bench/topology.py [--batch 32] [--rounds 11] [--threads 2] [--peers FOLDER]

ResNet-18 (CIFAR stem) on the CPU, SGD with momentum, RigL at 90 % uniform sparsity. Every contender, one of them
without any mask, has a model of its own and takes one ordinary training step and one update step per round, in
turn, so that a machine that slows down slows all of them. `step` is the median over rounds of the ordinary step
divided by the unmasked one of the same round; `update` is everything that follows the backward pass of an update
step, in unmasked steps.

The peers are measured where they are found; they install without their dependencies:

    pip install --no-deps --target FOLDER rigl-torch==0.5.2 sparsimony==0.1.0
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models import resnet18
from equipoise.topology import RigL

SPARSITY, DROP_FRACTION, EVERY = 0.9, 0.3, 2
LONG = 1_000_000  # steps of a training that never ends here
PEERS = Path(tempfile.gettempdir()) / "equipoise-peers"
INSTALL = "pip install --no-deps --target {folder} rigl-torch==0.5.2 sparsimony==0.1.0"


class Contender(NamedTuple):
    """A model in training, and what its loop calls after the backward pass."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    after_backward: Callable[[], object]


class Times(NamedTuple):
    """Seconds of one round: an ordinary step, and what follows the backward pass of an update step."""

    step: float
    update: float


def dense_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = resnet18()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def unmasked() -> Contender:
    model, optimizer = dense_model()
    return Contender("without masks", model, optimizer, optimizer.step)


def equipoise() -> Contender:
    model, optimizer = dense_model()
    algorithm = RigL(sparsity=SPARSITY, distribution="uniform", drop_fraction=DROP_FRACTION, every=EVERY)
    algorithm.attach(model, optimizer, total_steps=LONG)
    return Contender("equipoise", model, optimizer, optimizer.step)


def rigl_torch() -> Contender:
    _stand_in_for_torchvision()
    from rigl_torch.RigL import RigLScheduler  # type: ignore[import-not-found]

    model, optimizer = dense_model()
    pruner = RigLScheduler(
        model,
        optimizer,
        dense_allocation=1 - SPARSITY,
        T_end=LONG,
        delta=EVERY,
        alpha=DROP_FRACTION,
        ignore_linear_layers=False,
    )
    return Contender("rigl-torch 0.5.2", model, optimizer, lambda: optimizer.step() if pruner() else None)


def sparsimony() -> Contender:
    from sparsimony.distributions.base import UniformDistribution  # type: ignore[import-not-found]
    from sparsimony.dst.rigl import RigL as TheirRigL  # type: ignore[import-not-found]
    from sparsimony.schedulers.base import CosineDecayScheduler  # type: ignore[import-not-found]

    model, optimizer = dense_model()
    schedule = CosineDecayScheduler(DROP_FRACTION, t_end=LONG, delta_t=EVERY)
    pruner = TheirRigL(schedule, UniformDistribution(), optimizer, sparsity=SPARSITY, init_method=None)
    weighted = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    pruner.prepare(model, [{"tensor_fqn": f"{name}.weight"} for name in weighted])

    def after_backward() -> None:
        optimizer.step()
        pruner.step()

    return Contender("sparsimony 0.1.0", model, optimizer, after_backward)


def _stand_in_for_torchvision() -> None:
    """rigl-torch imports torchvision and uses it for two classes that it treats like any other."""
    names = ("torchvision", "torchvision.models", "torchvision.models.resnet")
    top, models, resnet = (sys.modules.setdefault(name, types.ModuleType(name)) for name in names)
    vars(top)["models"], vars(models)["resnet"] = models, resnet
    for block in ("Bottleneck", "BasicBlock"):
        vars(resnet).setdefault(block, type(block, (), {}))


def found_contenders() -> list[Contender]:
    """Ours always; a peer where it can be imported."""
    contenders = [unmasked(), equipoise()]
    for make in (rigl_torch, sparsimony):
        try:
            contenders.append(make())
        except ImportError:
            print(f"{make.__name__} is not installed and left out (see the top of this file)", file=sys.stderr)
    return contenders


def iteration(contender: Contender, images: Tensor, labels: Tensor) -> Times:
    """One training iteration: all of it, and what follows its backward pass."""
    start = time.perf_counter()
    contender.optimizer.zero_grad()
    F.cross_entropy(contender.model(images), labels).backward()
    middle = time.perf_counter()
    contender.after_backward()
    end = time.perf_counter()
    return Times(end - start, end - middle)


def measure(contenders: list[Contender], batch: int, rounds: int) -> dict[str, list[Times]]:
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    times: dict[str, list[Times]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds + 1):  # the first is for warming up
        shift = turn % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            ordinary, update = iteration(contender, images, labels), iteration(contender, images, labels)
            if turn:
                times[contender.name].append(Times(ordinary.step, update.update))
    return times


def markdown(times: dict[str, list[Times]]) -> str:
    (_, plain), *others = times.items()
    unit = statistics.median(t.step for t in plain)
    rows = [("", "step, of the unmasked one", "update, in unmasked steps")]
    rows.append(("without masks", f"1 ({unit * 1000:.0f} ms)", ""))
    for name, rounds in others:
        step = statistics.median(t.step / p.step for t, p in zip(rounds, plain, strict=True))
        update = statistics.median(t.update / p.step for t, p in zip(rounds, plain, strict=True))
        rows.append((name, f"{step:.3f}", f"{update:.2f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with rigl-torch and sparsimony")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peers.is_dir():
        sys.path.append(str(options.peers))
    else:
        print(f"to measure the peers too: {INSTALL.format(folder=options.peers)}", file=sys.stderr)
    times = measure(found_contenders(), options.batch, options.rounds)
    print(f"ResNet-18, CIFAR stem, batch {options.batch}, {options.threads} threads, torch {torch.__version__},")
    print(f"RigL at {SPARSITY:.0%}, medians of {options.rounds} rounds; targets: step 1.03, update 0.7\n")
    print(markdown(times))


if __name__ == "__main__":
    main()
