"""CPU benchmark: a table of packed models on the sparse kernels against dense PyTorch.

    python bench/cpu.py [--models vgg_c resnet18] [--sparsity 0.9 0.95 0.99] [--repeats 7] [--cpu-time] [--write]

Below the table, all at 99 %: the training step of sparseprop if it is installed (pip install --no-deps sparseprop; it
chooses the fastest form of every layer), an epoch of SET with AGENT against an epoch of dense SGD, the size of the
exported file, and the memory of training.

Every number is the median of repeats. Rivals take turns in one run, so that a busy moment of the machine hits all of
them. The dense rival is the faster of NCHW and channels_last. On a shared machine, `OMP_NUM_THREADS=1 ... --cpu-time`
counts the time of this process only.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.correction import Agent, Loss
from equipoise.deploy import Blueprint, Network, write_packed
from equipoise.deploy.benchmark import interleaved
from equipoise.deploy.frozen import freeze
from equipoise.models.resnet import resnet18
from equipoise.models.vgg import vgg_c
from equipoise.topology import SET
from equipoise.topology.distribution import active_counts
from equipoise.topology.packing import pack

MODELS: dict[str, Callable[[], nn.Module]] = {"vgg_c": vgg_c, "resnet18": resnet18}
TARGETS = {
    ("vgg_c", "train"): {0.9: 2.5, 0.95: 4.0, 0.99: 9.0},
    ("vgg_c", "infer 128"): {0.9: 2.0, 0.95: 3.0, 0.99: 9.0},
    ("vgg_c", "infer 1"): {0.9: 3.0, 0.95: 4.5, 0.99: 9.0},
}
Work = Callable[[], object]
Clock = Callable[[], float]


def random_masks(model: nn.Module, sparsity: float) -> dict[str, Tensor]:
    """Random masks with ERK counts."""
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
    """The work to time, by task and rival."""
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


def milliseconds(work: dict[str, Work], repeats: int, clock: Clock) -> dict[str, float]:
    """Median milliseconds of each rival."""
    return {name: 1e3 * seconds for name, seconds in interleaved(work, repeats, clock).items()}


def row(name: str, task: str, sparsities: list[float], times: dict[str, float]) -> str:
    dense = min(times["nchw"], times["channels_last"])
    cells = [f"{name} {task}", f"{times['nchw']:.1f}, {times['channels_last']:.1f}"]
    for sparsity in sparsities:
        mine = times[f"{sparsity:g}"]
        target = TARGETS.get((name, task), {}).get(sparsity)
        cells.append(f"{mine:.1f} ms = {dense / mine:.1f} ×" + (f" (at least {target:g})" if target else ""))
    return f"| {' | '.join(cells)} |"


def sparseprop_rival(model: nn.Module, masks: dict[str, Tensor], batch: int) -> nn.Module:
    """The same sparse weights in the modules of sparseprop, which measures their alternatives."""
    from sparseprop.utils import swap_modules_with_sparse  # type: ignore[import-not-found]

    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # sparseprop returns views, which autograd does not allow to change
    with contextlib.redirect_stdout(io.StringIO()):
        return cast(nn.Module, swap_modules_with_sparse(model, (batch, 3, 32, 32)))


def against_sparseprop(repeats: int, clock: Clock, batch: int = 128) -> str:
    model, x, y = vgg_c(), torch.rand(batch, 3, 32, 32), torch.randint(10, (batch,))
    masks = random_masks(model, 0.99)
    work = {
        "equipoise": training_step(pack(model, masks), x, y),
        "sparseprop": training_step(sparseprop_rival(model, masks, batch), x, y),
    }
    times = milliseconds(work, repeats, clock)
    return (
        f"Training step of VGG-C at 99 % on sparseprop: {times['sparseprop']:.1f} ms, here "
        f"{times['equipoise']:.1f} ms = {times['sparseprop'] / times['equipoise']:.1f} × (at least 3)."
    )


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def epochs(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Work]:
    """An epoch of dense SGD, and one of SET with AGENT by replay at 99 %, packed."""
    dense = cast(Any, vgg_c()).to(memory_format=torch.channels_last).train()
    last = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01, momentum=0.9)

    def dense_epoch() -> None:
        for x, y in last:
            optimizer.zero_grad()
            loss_fn(dense, x, y).backward()
            optimizer.step()

    algorithm = SET(sparsity=0.99, every=len(batches))
    sparse = pack(vgg_c(), algorithm).train()
    stepper = torch.optim.SGD(sparse.parameters(), lr=0.01, momentum=0.9)
    topology = algorithm.attach(sparse, stepper, 1000 * len(batches))
    agent = Agent(mode="replay", coefficient=Loss(batch_fraction=0.1)).attach(sparse, topology)  # as in 391 batches

    def sparse_epoch() -> None:
        agent.refresh(batches, loss_fn)
        for x, y in batches:
            agent.backward(loss_fn, x, y)
            stepper.step()
            stepper.zero_grad()

    return {"dense SGD": dense_epoch, "SET with AGENT": sparse_epoch}


def whole_epochs(repeats: int, clock: Clock) -> str:
    batches = [(torch.rand(128, 3, 32, 32), torch.randint(10, (128,))) for _ in range(20)]
    dense, sparse = interleaved(epochs(batches), repeats, clock).values()
    return (
        f"An epoch of {len(batches)} batches of SET with AGENT, `replay`, 99 %, packed, one update of the topology: "
        f"{sparse:.2f} s; of plain dense SGD: {dense:.2f} s = {dense / sparse:.1f} × (at least 3.5)."
    )


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = value.values()
    return sum(map(bytes_of, value)) if isinstance(value, Iterable) and not isinstance(value, str) else 0


def memory() -> str:
    """Memory of training between steps: weights, gradients, momentum, indices, flags, and the copies of AGENT."""
    x, y = torch.rand(16, 3, 32, 32), torch.randint(10, (16,))
    dense = sum(3 * p.numel() * p.element_size() for p in vgg_c().parameters())
    algorithm = SET(sparsity=0.99)
    model = pack(vgg_c(), algorithm).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    topology = algorithm.attach(model, optimizer, 1000)
    agent = Agent(mode="recompute").attach(model, topology)
    for _ in range(2):
        agent.refresh([(x, y)] * 2, loss_fn)
        agent.backward(loss_fn, x, y)
        optimizer.step()
    parameters, states = list(model.parameters()), (optimizer.state_dict(), topology.state_dict(), agent.state_dict())
    held = bytes_of((parameters, model.buffers(), [p.grad for p in parameters], states))
    return (
        f"Weights, gradients, momentum, indices and copies of AGENT for VGG-C at 99 %, packed: {held / 1e6:.1f} MB; "
        f"weights, gradients and momentum of dense SGD: {dense / 1e6:.1f} MB = {dense / held:.1f} × (at least 15)."
    )


def file_size() -> str:
    model = vgg_c()
    masks = random_masks(model, 0.99)
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    dense = bytes_of(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vgg_c.safetensors"
        blueprint = Blueprint("vgg_c", {"classes": 10, "channels": 3}, (3, 32, 32), (0.0,) * 3, (1.0,) * 3)
        write_packed(Network(blueprint, model.state_dict()), path)
        size = path.stat().st_size
    return (
        f"File of VGG-C at 99 %, float32: {size / 1e6:.3f} MB of {dense / 1e6:.1f} MB = 1/{dense / size:.0f} (1/40)."
    )


def heading() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (
        f"{date.today()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, commit {commit or 'unknown'}; `bench/cpu.py`."
    )


def write(text: str) -> None:
    """Replace the section of docs/benchmarks.md between this script's markers."""
    begin, end = "<!-- cpu -->", "<!-- /cpu -->"
    page = Path(__file__).parents[1] / "docs" / "benchmarks.md"
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2] if rest else "\n"
    page.write_text(f"{before.rstrip()}\n\n{begin}\n## Packed models on a CPU\n\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    parser.add_argument("--tasks", nargs="+", default=["train", "infer 128", "infer 1"])
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of this process instead of wall time")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.manual_seed(0)
    lines = [heading(), ""]
    lines.append("| | dense NCHW, channels_last, ms |" + "".join(f" {100 * s:g} % |" for s in arguments.sparsity))
    lines.append("|---|---|" + "---|" * len(arguments.sparsity))
    print("\n".join(lines), flush=True)
    for name in arguments.models:
        for task, work in jobs(MODELS[name](), arguments.sparsity, batch=128).items():
            if task in arguments.tasks:
                repeats = arguments.repeats * (10 if task == "infer 1" else 1)
                lines.append(row(name, task, arguments.sparsity, milliseconds(work, repeats, clock)))
                print(lines[-1], flush=True)
    others = [lambda: whole_epochs(3, clock), memory, file_size]
    if find_spec("sparseprop"):
        others.insert(0, lambda: against_sparseprop(arguments.repeats, clock))
    for measured in others:
        lines += ["", measured()]
        print(lines[-1], flush=True)
    if arguments.write:
        write("\n".join(lines))


if __name__ == "__main__":
    main()
