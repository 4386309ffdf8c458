"""CPU benchmark: packed models on the sparse kernels against every form of dense PyTorch.

    python bench/cpu.py [SECTION ...] [--sparsity 0.9 0.95 0.99] [--repeats 7] [--threads 2] [--no-compile] [--cpu-time]
    python bench/cpu.py --write        write docs/benchmarks.md from bench/results/cpu.json

Each section is one or more cases. The rivals of a case are the dense model in {float32, bf16 autocast} x {NCHW,
channels_last} x {eager, torch.compile} and the packed model at each sparsity. They take turns in one process, so that a
busy moment of the machine hits all of them, and every number is a median. Ratios are against the fastest dense float32
and against the fastest dense rival of the same run. A run replaces the results of its sections in
bench/results/cpu.json, from which tables and charts are made; `--results cpu-NAME.json` keeps those of another machine.

Sections: vgg_c and resnet18 (training step, batch 128), inference (VGG-C, frozen, batch 128 and 1, with onnxruntime if
it is installed), transformers (forward and backward pass, batch 4), epoch (SET with AGENT against dense SGD at 99 %),
sparseprop (if it is installed), models (networks at sparsities at which packing may not pay), layers (convolutions, to
fit `equipoise.storage.layer_cost`), size (memory and file at 99 %).
On a shared machine, `--threads 1 --cpu-time` counts the time of this process only.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import io
import itertools
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu_models import ViT, efficientnet, gpt, regnet
from equipoise.correction import Agent, Loss
from equipoise.deploy import Blueprint, Network, onnx_model, write_packed
from equipoise.deploy.benchmark import interleaved
from equipoise.deploy.frozen import freeze
from equipoise.models import MODELS
from equipoise.models.resnet import resnet18
from equipoise.models.vgg import vgg_c
from equipoise.topology import SET
from equipoise.topology.distribution import active_counts
from equipoise.topology.packing import pack
from equipoise.topology.selection import select

RESULTS = Path(__file__).parent / "results" / "cpu.json"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
Work = Callable[[], object]
Make = Callable[[nn.Module, Tensor], Work]  # the work of one call, for a model and its input


# -- rivals


@dataclass(frozen=True)
class Dense:
    """A form of the dense model."""

    precision: str
    layout: str
    mode: str

    def __str__(self) -> str:
        return f"dense {self.precision}, {self.layout}, {self.mode}"

    def work(self, model: nn.Module, x: Tensor, make: Make) -> Work:
        model = copy.deepcopy(model)
        if self.layout == "channels_last" and x.dim() == 4:
            model, x = cast(Any, model).to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        work = make(torch.compile(model) if self.mode == "compile" else model, x)  # type: ignore[arg-type]
        if self.precision == "float32":
            return work

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                work()

        return run


DENSE = [
    Dense(*form) for form in itertools.product(("float32", "bf16"), ("NCHW", "channels_last"), ("eager", "compile"))
]
PACKED: dict[str, dict[str, Any]] = {"packed": {}, "packed bf16": {"precision": "bf16"}}  # options of `pack`


@functools.cache
def packed_forms() -> dict[str, dict[str, Any]]:
    """The entries of `PACKED` that this version of `pack` has."""
    found = {}
    for name, options in PACKED.items():
        try:
            pack(nn.Sequential(nn.Linear(1, 1)), {}, **options)
            found[name] = options
        except TypeError:
            print(f"without {name}: pack has no option {', '.join(options)}")
    return found


def random_masks(model: nn.Module, sparsity: float) -> dict[str, Tensor]:
    """Random masks with ERK counts."""
    weights = select(model)
    counts = active_counts("erk", {name: tuple(p.shape) for name, p in weights.items()}, 1 - sparsity)
    masks = {}
    for name, weight in weights.items():
        flat = torch.zeros(weight.numel(), dtype=torch.bool)
        flat[torch.randperm(weight.numel())[: counts[name]]] = True
        masks[name] = flat.view(weight.shape)
    return masks


def packed_models(model: nn.Module, sparsities: Iterable[float]) -> Iterator[tuple[str, float, nn.Module]]:
    """Each form of the packed model, at each sparsity."""
    for (name, options), sparsity in itertools.product(packed_forms().items(), sparsities):
        yield name, sparsity, pack(model, random_masks(model, sparsity), **options)


def training_step(model: nn.Module, x: Tensor) -> Work:
    labels = torch.randint(10, (len(x),))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def forward_backward(model: nn.Module, x: Tensor) -> Work:
    def run() -> None:
        for parameter in model.train().parameters():
            parameter.grad = None
        model(x).float().square().mean().backward()

    return run


def inference(model: nn.Module, x: Tensor) -> Work:
    model.eval()

    def run() -> None:
        with torch.inference_mode():
            model(x)

    return run


def onnxruntime(model: nn.Module, x: Tensor, folder: Path) -> Work:
    file = folder / f"{len(x)}.onnx"
    onnx_model.write_model(copy.deepcopy(model).eval(), tuple(x.shape[1:]), file)
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Otherwise its threads keep the cores busy after a run, in the time of the next rival.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    images = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, images)


# -- cases


@dataclass
class Case:
    """Rivals that take turns."""

    name: str
    rivals: dict[str, Work] = field(default_factory=dict)
    repeats: int = 1  # times as many as asked for
    in_a_row: int = 1  # calls of a rival before the next one has its turn; times are those of one call


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    sparsities: list[float]
    dense: list[Dense]


def case(name: str, model: nn.Module, x: Tensor, make: Make, options: Options, frozen: bool = False) -> Case:
    rivals = {str(form): form.work(model, x, make) for form in options.dense}
    for packed, sparsity, net in packed_models(model, options.sparsities):
        rivals[f"{packed} {100 * sparsity:g} %"] = make(freeze(net) if frozen else net, x)
    return Case(name, rivals)


def step_of(name: str) -> Callable[[Options], Iterator[Case]]:
    def cases(options: Options) -> Iterator[Case]:
        make: Callable[[], nn.Module] = {"vgg_c": vgg_c, "resnet18": resnet18}[name]
        yield case(f"{name}, training step, batch 128", make(), torch.rand(128, 3, 32, 32), training_step, options)

    return cases


def inference_cases(options: Options) -> Iterator[Case]:
    missing = [*onnx_model.missing(), *([] if find_spec("onnxruntime") else ["onnxruntime"])]
    if missing:
        print(f"without onnxruntime: {', '.join(missing)} not installed (pip install equipoise[onnx])")
    with tempfile.TemporaryDirectory() as folder:
        for batch in (128, 1):
            model, x = vgg_c().eval(), torch.rand(batch, 3, 32, 32)
            found = case(f"vgg_c, inference, batch {batch}", model, x, inference, options, frozen=True)
            if not missing:
                found.rivals["onnxruntime, dense float32"] = onnxruntime(model, x, Path(folder))
            found.repeats = 10 if batch == 1 else 1
            yield found
        # Above, every image finds caches full of the other rivals' weights. A server classifies one after another.
        yield Case(f"{found.name}, 10 in a row", found.rivals, in_a_row=10)


def transformer_cases(options: Options) -> Iterator[Case]:
    plain = Options(options.sparsities, [form for form in options.dense if form.layout == "NCHW"])
    for width, blocks in ((768, 2), (256, 4)):
        x = torch.randn(4, 256, width)
        name = f"GPT, d = {width}, {blocks} blocks, 256 tokens, forward and backward, batch 4"
        yield case(name, gpt(width, blocks), x, forward_backward, plain)
        yield case(f"GPT, d = {width}, inference, batch 4", gpt(width, blocks), x, inference, plain, frozen=True)
    images = torch.randn(4, 3, 224, 224)
    yield case("ViT, d = 192, 6 blocks, forward and backward, batch 4", ViT(), images, forward_backward, options)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def epoch_cases(options: Options) -> Iterator[Case]:
    """Epochs of dense SGD, and of SET with AGENT by replay at 99 %, packed."""
    batches = [(torch.rand(128, 3, 32, 32), torch.randint(10, (128,))) for _ in range(20)]
    found = Case(f"vgg_c, epoch of {len(batches)} batches of 128 with one update of the topology, 99 %")
    for form in options.dense:
        if form.mode == "eager":
            steps = [form.work(vgg_c(), x, training_step) for x, _ in batches[:1]] * len(batches)
            found.rivals[f"SGD, {form}"] = lambda steps=steps: [step() for step in steps]  # type: ignore[misc]
    algorithm = SET(sparsity=0.99, every=len(batches))
    for name, model_options in packed_forms().items():
        model = pack(vgg_c(), algorithm, **model_options).train()
        found.rivals[f"SET with AGENT (replay), {name}"] = agent_epoch(model, algorithm, batches)
    yield found


def agent_epoch(model: nn.Module, algorithm: SET, batches: list[tuple[Tensor, Tensor]]) -> Work:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    topology = algorithm.attach(model, optimizer, 1000 * len(batches))
    agent = Agent(mode="replay", coefficient=Loss(batch_fraction=0.1)).attach(model, topology)  # as in 391 batches

    def epoch() -> None:
        agent.refresh(batches, loss_fn)
        for x, y in batches:
            agent.backward(loss_fn, x, y)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def sparseprop_cases(options: Options) -> Iterator[Case]:
    """The same sparse weights in the modules of sparseprop, which measures their alternatives."""
    if not find_spec("sparseprop"):
        print("sparseprop is not installed (pip install --no-deps sparseprop)")
        return
    from sparseprop.utils import swap_modules_with_sparse  # type: ignore[import-not-found]

    model, x = vgg_c(), torch.rand(128, 3, 32, 32)
    masks = random_masks(model, 0.99)
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for name, mask in masks.items():
            pruned.get_parameter(name).mul_(mask)
    for module in pruned.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # sparseprop returns views, which autograd does not allow to change
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = cast(nn.Module, swap_modules_with_sparse(pruned, tuple(x.shape)))
    works = {"packed 99 %": training_step(pack(model, masks), x), "sparseprop 99 %": training_step(theirs, x)}
    yield Case("vgg_c, training step, batch 128, sparseprop", works)


def model_cases(options: Options) -> Iterator[Case]:
    """Networks at sparsities at which packing may not pay: packed ones must not be slower.

    The packed ones run in both layouts too: a model whose layers run dense is as fast as its layout is.
    """
    for name in ("small", "mlp", "vgg_c", "resnet18", "resnet50", "wrn_28_4", "regnet", "efficientnet"):
        size = 8 if name in ("small", "mlp") else 32
        own = {"regnet": regnet, "efficientnet": efficientnet}
        make: Callable[[], nn.Module] = own.get(name) or (
            functools.partial(MODELS[name], channels=3, size=size) if size == 8 else MODELS[name]
        )
        model, x = make(), torch.rand(16, 3, size, size)
        wanted = Options([0.5, 0.8, 0.9], [form for form in options.dense if form.precision == "float32"])
        found = case(f"{name}, training step, batch 16", model, x, training_step, wanted)
        for packed, sparsity, net in packed_models(model, wanted.sparsities):
            images = x.to(memory_format=torch.channels_last)
            found.rivals[f"{packed} {100 * sparsity:g} %, channels_last"] = training_step(net, images)
        found.in_a_row = 10 if size == 8 else 1
        yield found


def layer_cases(options: Options) -> Iterator[Case]:
    """Four equal convolutions in a row, by channels, kernel, size of the map and groups."""
    eager = [form for form in options.dense if form.precision == "float32" and form.mode == "eager"]
    for channels, kernel, size, groups in (
        (64, 3, 32, 1), (256, 3, 8, 1), (512, 3, 4, 1), (64, 1, 16, 1), (256, 1, 8, 1), (512, 1, 8, 1),
        (128, 3, 16, 8), (128, 3, 16, 128), (128, 7, 8, 128),
    ):  # fmt: skip
        convs = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups) for _ in range(4)]
        name = f"{channels} channels, kernel {kernel}, map {size}x{size}, {groups} groups, batch 32"
        x = torch.randn(32, channels, size, size, requires_grad=True)
        yield case(name, nn.Sequential(*convs), x, forward_backward, Options(options.sparsities, eager))


SECTIONS: dict[str, Callable[[Options], Iterator[Case]]] = {
    "vgg_c": step_of("vgg_c"),
    "resnet18": step_of("resnet18"),
    "inference": inference_cases,
    "transformers": transformer_cases,
    "epoch": epoch_cases,
    "sparseprop": sparseprop_cases,
    "models": model_cases,
    "layers": layer_cases,
}


# -- sizes


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = value.values()
    return sum(map(bytes_of, value)) if isinstance(value, Iterable) and not isinstance(value, str) else 0


def sizes() -> dict[str, int]:
    """Bytes of VGG-C at 99 %: training between steps, and the exported file."""
    x, y = torch.rand(16, 3, 32, 32), torch.randint(10, (16,))
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
    network = vgg_c()
    with torch.no_grad():
        for name, mask in random_masks(network, 0.99).items():
            network.get_parameter(name).mul_(mask)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vgg_c.safetensors"
        blueprint = Blueprint("vgg_c", {"classes": 10, "channels": 3}, (3, 32, 32), (0.0,) * 3, (1.0,) * 3)
        write_packed(Network(blueprint, network.state_dict()), path)
        file = path.stat().st_size
    return {
        "memory, dense SGD: weights, gradients, momentum": 3 * bytes_of(list(network.parameters())),
        "memory, packed SET with AGENT: the same, indices and copies": bytes_of(
            (parameters, model.buffers(), [p.grad for p in parameters], states)
        ),
        "file, dense": bytes_of(network.state_dict()),
        "file, packed": file,
    }


# -- results


def measure(found: Case, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    turns = {name: functools.partial(in_a_row, work, found.in_a_row) for name, work in found.rivals.items()}
    seconds = interleaved(turns, repeats * found.repeats, clock)
    return {
        "case": found.name,
        "repeats": repeats * found.repeats,
        "milliseconds": {name: round(1e3 * s / found.in_a_row, 3) for name, s in seconds.items()},
    }


def in_a_row(work: Work, calls: int) -> None:
    for _ in range(calls):
        work()


def save(file: Path, section: str, about: dict[str, Any], measured: Any) -> None:
    """Replace one section of a file of results."""
    results = json.loads(file.read_text()) if file.exists() else {}
    results[section] = {"about": about, "measured": measured}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")


def table(measured: dict[str, Any]) -> str:
    """One case as a table, with ratios against the fastest dense float32 and the fastest dense rival."""
    times: dict[str, float] = measured["milliseconds"]
    dense = {name: ms for name, ms in times.items() if "dense" in name and not name.startswith("onnx")}
    float32 = min((ms for name, ms in dense.items() if "float32" in name), default=None)
    best = min(dense.values(), default=None)
    lines = [f"| {measured['case']} | ms | of the best float32 | of the best dense |", "|---|---|---|---|"]
    for name, ms in times.items():
        ratios = [f"{reference / ms:.2f} ×" if reference else "" for reference in (float32, best)]
        lines.append(f"| {name} | {ms:.1f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def size_table(measured: dict[str, int]) -> str:
    lines = [f"| {name} | {size / 1e6:.2f} MB |" for name, size in measured.items()]
    return "\n".join(["| VGG-C, 99 % | |", "|---|---|", *lines])


def page(file: Path) -> str:
    """All results of a file as tables."""
    text = []
    for section, found in json.loads(file.read_text()).items():
        about = found["about"]
        text.append(
            f"{about['date']}, {about['threads']} threads, {about['cpu']}, torch {about['torch']}, commit "
            f"{about['commit']}, {about['clock']}; `bench/cpu.py {section}`."
        )
        text += [size_table(found["measured"])] if section == "size" else [table(case) for case in found["measured"]]
    return "\n\n".join(text)


def write() -> None:
    """Replace the section of docs/benchmarks.md between this script's markers."""
    begin, end = "<!-- cpu -->", "<!-- /cpu -->"
    before, _, rest = PAGE.read_text().partition(begin)
    after = rest.partition(end)[2] if rest else "\n"
    text = f"## Packed models on a CPU\n\n{page(RESULTS)}"
    for other in sorted(RESULTS.parent.glob("cpu-*.json")):
        text += f"\n\n### Packed models on another CPU\n\n{page(other)}"
    PAGE.write_text(f"{before.rstrip()}\n\n{begin}\n{text}\n{end}{after}")


def processor() -> str:
    """Name, family and model of the processor; only the last two tell its generation if a cloud hides the name.

    AMX, in which dense bf16 is several times as fast, is named too.
    """
    information = Path("/proc/cpuinfo")
    lines = information.read_text().split("\n\n")[0].splitlines() if information.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = (found.get("model name", platform.machine()), found.get("cpu family"), found.get("model"))
    told = " ".join(f"{word}{name}" for word, name in zip(("", "family ", "model "), names, strict=True) if name)
    return told + ", AMX" * ("amx_bf16" in found.get("flags", "").split())


def about(cpu_time: bool) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": str(date.today()),
        "threads": torch.get_num_threads(),
        "cpu": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "clock": "processor time" if cpu_time else "wall time",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SECTIONS, "size"]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(names)}; all by default")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch and the kernels; torch's default if not given")
    parser.add_argument("--no-compile", action="store_true", help="leave out the rivals with torch.compile")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of this process instead of wall time")
    parser.add_argument("--results", default=RESULTS.name, help="name of the file in bench/results")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md from the saved results")
    given = parser.parse_args()
    if unknown := set(given.sections) - set(names):
        parser.error(f"no section is called {min(unknown)}; choose from {', '.join(names)}")
    torch.set_num_threads(given.threads or torch.get_num_threads())
    clock = time.process_time if given.cpu_time else time.perf_counter
    file = RESULTS.with_name(given.results)
    dense = [form for form in DENSE if form.mode == "eager" or not given.no_compile]
    for section in given.sections or ([] if given.write else names):
        torch.manual_seed(0)
        if section == "size":
            found_sizes = sizes()
            save(file, section, about(given.cpu_time), found_sizes)
            print(size_table(found_sizes) + "\n", flush=True)
            continue
        measured = []
        for found in SECTIONS[section](Options(given.sparsity, dense)):
            measured.append(measure(found, given.repeats, clock))
            print(table(measured[-1]) + "\n", flush=True)
            torch._dynamo.reset()
        save(file, section, about(given.cpu_time), measured)
    if given.write:
        write()


if __name__ == "__main__":
    main()
