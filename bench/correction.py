"""Time and memory of gradient correction compared with plain SGD, and the variance it leaves.

    python bench/correction.py [--rounds 5] [--batches 4] [--threads 2]

ResNet-18 of width 16 at 90 % (SET), images of 32x32 pixels, batch 128, CPU. The arms take turns, one epoch each, so
that a machine that slows down slows all of them; medians are compared. Limits: `recompute` 3.3 times SGD, `replay`
and `running` 2.1, `running` on a quarter of the steps 1.35; combining gradients 3 % of a step.

Combining is timed with a loss that costs almost nothing, so that the time is that of the correction itself. Memory is
the peak of torch's allocations, on images so small that activations do not hide it. Variance is computed over all
batches at the same weights, next to that of a larger batch of the same cost.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from equipoise.correction import SGD, SVRG, Agent, Correction, Estimator, Gradient
from equipoise.models import resnet18
from equipoise.topology import SET

Batch = tuple[Tensor, Tensor]

BATCH = 128
ARMS: dict[str, tuple[Estimator, float]] = {  # with the limit of the time of an epoch
    "SGD": (SGD(), 1.0),
    "recompute": (Agent(), 3.3),
    "replay": (Agent(mode="replay", coefficient="gradient"), 2.1),
    "running": (Agent(mode="running"), 2.1),
    "running, a quarter": (Agent(mode="running", step_fraction=0.25), 1.35),
}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def random_batches(count: int, size: int, pixels: int = 32) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(size, 3, pixels, pixels, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


class Arm:
    """A model and its correction."""

    def __init__(self, estimator: Estimator) -> None:
        torch.manual_seed(0)
        self.model = resnet18(width=16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.topology = SET(sparsity=0.9, every=7).attach(self.model, self.optimizer, 100_000)
        self.correction: Correction = estimator.attach(self.model, self.topology)

    def epoch(self, batches: list[Batch], loss: Callable[..., Tensor] = loss_fn, refresh: bool = True) -> None:
        if refresh:
            self.correction.refresh(batches, loss)
        for x, y in batches:
            self.correction.backward(loss, x, y)
            self.optimizer.step()
            self.optimizer.zero_grad()


def processor_seconds(task: Callable[[], object]) -> float:
    """Return the processor time of all threads, which other programs do not lengthen."""
    begin = time.process_time()
    task()
    return time.process_time() - begin


def interleaved(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median of each task in seconds; the first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    order = list(tasks)
    for round_number in range(rounds + 1):
        for name in order:
            spent = processor_seconds(tasks[name])
            if round_number:
                times[name].append(spent)
        order = order[1:] + order[:1]
    return {name: statistics.median(spent) for name, spent in times.items()}


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


# Time


def time_epochs(rounds: int, count: int) -> float:
    """Print the ratios to SGD; return the seconds of one step of SGD."""
    batches = random_batches(count, BATCH)
    arms = {name: Arm(estimator) for name, (estimator, _) in ARMS.items()}
    medians = interleaved({name: partial(arm.epoch, batches) for name, arm in arms.items()}, rounds)
    rows = []
    for name, (estimator, limit) in ARMS.items():
        ratio = medians[name] / medians["SGD"]
        holds = "yes" if ratio <= limit else "NO"
        rows.append([name, f"{estimator.cost:.2f}", f"{ratio:.2f}", f"{limit:.2f}", holds])
    table(["epoch", "passes", "time", "limit", "holds"], rows)
    return medians["SGD"] / count


def cheap_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss that uses every parameter and costs almost nothing."""
    return torch.stack([p.sum() for p in model.parameters()]).sum()


def time_combining(step: float, rounds: int = 15) -> None:
    """Print the cost of a corrected step beyond its passes, as a fraction of a step of SGD."""
    batches = random_batches(10, 1, pixels=1)
    gradient = SVRG(coefficient=Gradient(per_layer=True))
    estimators = {"SGD": SGD(), "replay": SVRG(mode="replay"), "running": SVRG(mode="running"), "per layer": gradient}
    arms = {name: Arm(estimator) for name, estimator in estimators.items()}
    model = arms["SGD"].model
    times: dict[str, list[float]] = {name: [] for name in (*arms, "pass")}
    for _ in range(rounds):
        for name, arm in arms.items():
            arm.correction.refresh(batches, cheap_loss)
            task = partial(arm.epoch, batches, cheap_loss, refresh=False)
            times[name].append(processor_seconds(task) / len(batches))
        one_pass = partial(differentiate, model)
        times["pass"].append(processor_seconds(one_pass))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name in ("replay", "running", "per layer"):
        extra = medians[name] - medians["SGD"] - (0 if name == "replay" else medians["pass"])
        holds = "yes" if extra <= 0.03 * step else "NO"
        rows.append([name, f"{1e3 * extra:.2f} ms", f"{extra / step:.2%}", "3 %", holds])
    table(["combining", "beyond the passes", "of a step", "limit", "holds"], rows)


def differentiate(model: nn.Module) -> None:
    """The second pass of the cheap loss, which is not part of the combining."""
    torch.autograd.grad(cheap_loss(model, torch.empty(0), torch.empty(0)), list(model.parameters()))


# Memory


def peak_bytes(task: Callable[[], object]) -> int:
    """Return the peak of torch's allocations during the task."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    before = int(changes[0]["Total Allocated"]) - int(changes[0]["Bytes"])  # left over from earlier tasks
    return max(int(change["Total Allocated"]) for change in changes) - before


def measure_memory() -> None:
    """Print the peaks beyond that of SGD, in sizes of the model; the replay table is active weights x batches."""
    batches = random_batches(8, 2, pixels=4)
    model = resnet18(width=16)
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    peaks, rows = {}, []
    bf16 = Agent(mode="replay", coefficient="gradient", table="bf16"), 0.0
    for name, (estimator, _) in (ARMS | {"replay, bf16": bf16}).items():
        arm = Arm(estimator)
        peaks[name] = peak_bytes(partial(epochs, arm, batches, 2))
        if name == "SGD":
            continue
        extra = (peaks[name] - peaks["SGD"]) / size
        norms = sum(p.numel() for p in arm.model.parameters()) - arm.topology.size
        bytes_each = {"replay": 4, "replay, bf16": 2}.get(name, 0)
        rows_size = (arm.topology.active + norms) * len(batches) * bytes_each / size
        limit = 2 + rows_size
        estimated = arm.correction.estimate_cost(len(batches)).memory / size
        holds = "yes" if extra <= limit else "NO"
        rows.append([name, f"{extra:.2f}", f"{estimated:.2f}", f"{rows_size:.2f}", f"{limit:.2f}", holds])
    table(["memory, in models", "peak beyond SGD", "held", "of it rows", "limit", "holds"], rows)


def epochs(arm: Arm, batches: list[Batch], count: int) -> None:
    for _ in range(count):
        arm.epoch(batches)


# Variance


def class_batches(count: int, size: int) -> list[Batch]:
    """Images that can be learned: a pattern for each class with much noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(10, 3, 16, 16, generator=generator)
    batches = []
    for _ in range(count):
        y = torch.randint(10, (size,), generator=generator)
        batches.append((patterns[y] + 0.7 * torch.randn(size, 3, 16, 16, generator=generator), y))
    return batches


def gradients(model: nn.Module, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Return losses and gradients of all batches, computed on a copy of the model."""
    model = copy.deepcopy(model)
    losses, rows = [], []
    for x, y in batches:
        loss = loss_fn(model, x, y)
        found = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.detach())
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(losses).double(), torch.stack(rows)


def active(arm: Arm) -> Tensor:
    """Return the mask of active weights of all parameters as one vector."""
    masks = arm.topology.masks
    named = arm.model.named_parameters()
    return torch.cat([masks.get(name, torch.ones_like(p)).flatten().float() for name, p in named])


def spread(rows: Tensor) -> float:
    """Return the variance over rows, summed over columns."""
    return float(rows.var(0, correction=1).sum())


def measure_variance(count: int = 24, size: int = 32) -> None:
    """Print the variance left (1 is SGD) at two ages of the snapshot, next to larger batches of equal cost.

    The learning rate has decayed before: then a correction helps most.
    """
    batches = class_batches(count, size)
    arm = Arm(SGD())
    epochs(arm, batches, 2)
    arm.optimizer.param_groups[0]["lr"] /= 10
    old_losses, old = gradients(arm.model, batches)
    scatter = (old - old.mean(0)) * active(arm)
    arm.epoch(batches[:4])
    rows = variance_at(4, arm, batches, old_losses, scatter)
    arm.epoch(batches[4:])
    rows += variance_at(count, arm, batches, old_losses, scatter)
    head = ["age in steps", "estimator", "c", "cost", "variance left", "larger batch of that cost", "variance x cost"]
    table(head, rows)


def variance_at(age: int, arm: Arm, batches: list[Batch], old_losses: Tensor, scatter: Tensor) -> list[list[str]]:
    """Return the rows for one age; `scatter` is g_old - g̃ of every batch, zero at weights that were inactive."""
    now = active(arm)
    losses, new = gradients(arm.model, batches)
    new, scatter = new * now, scatter * now
    found = torch.cov(torch.stack([losses, old_losses]))
    c_hat = float((found[0, 1] / found[1, 1]).clamp(0, 1))
    c_star = float(((new - new.mean(0)) * scatter).sum() / scatter.square().sum())
    paper, gradient = Agent().cost, Agent(mode="replay", coefficient="gradient").cost
    arms = {"SGD": (0.0, 1.0), "loss ĉ": (c_hat, paper), "γ·ĉ": (0.1 * c_hat, paper), "c*": (c_star, gradient)}
    rows = []
    for name, (c, cost) in arms.items():
        left = spread(new - c * scatter) / spread(new)
        numbers = [f"{number:.2f}" for number in (c, cost, left, 1 / cost, left * cost)]
        rows.append([str(age), name, *numbers])
    pairs = zip(batches[::2], batches[1::2], strict=True)
    doubled = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs]
    larger = spread(gradients(arm.model, doubled)[1] * now) / spread(new)
    return [*rows, [str(age), "batch x 2", "", "2.00", f"{larger:.2f}", "0.50", f"{2 * larger:.2f}"]]


def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    step = time_epochs(chosen.rounds, chosen.batches)
    time_combining(step)
    measure_memory()
    measure_variance()


if __name__ == "__main__":
    main()
