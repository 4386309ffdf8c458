"""How fast training is on this GPU: seconds per epoch of every pipeline, and the table in docs/benchmarks.md.

    PYTHONPATH=src python3 bench/gpu.py --data FOLDER [--only NAME ...] [--write]

FOLDER holds CIFAR-10 (and CIFAR-100) in the official layout; images of what is missing there are random, which makes
no difference to the time. Evaluation is not part of the times. Takes less than 8 minutes with an empty compile cache.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from equipoise.training import Trainer, apply_overrides, make_recipe, read_recipe
from equipoise.training.evaluate import Score

ROOT = Path(__file__).parents[1]
WARM = 2  # epochs before the clock starts: compiling, capturing, the first snapshot


class Case(NamedTuple):
    """A pipeline: recipe and overrides, epochs that are timed, and the case and ratio it is held against."""

    recipe: str
    overrides: tuple[str, ...] = ()
    epochs: int = 3
    against: str = ""
    limit: float = 0.0


AGENT = "correction.name=agent"
STANDARD = ("objective=standard", "topology=static", "topology.sparsity=0.99", "topology.distribution=erk")
VGG16 = "bsr-vgg16-cifar10"
SGD = "VGG-C 99 %, SET-ITOP, SGD"
CASES = {
    SGD: Case("vgg_c-set-itop", epochs=10, limit=0.75),
    "VGG-C, AGENT, replay": Case("vgg_c-set-itop", (AGENT, "correction.mode=replay"), 3, SGD, 2.05),
    "VGG-C, AGENT, running, 1/4 of the steps": Case(
        "vgg_c-set-itop",
        (AGENT, "correction.mode=running", "correction.step_fraction=0.25"),
        3,
        SGD,
        1.35,
    ),
    "VGG-C, AGENT, recompute": Case("vgg_c-set-itop", (AGENT, "correction.mode=recompute"), 3, SGD),
    "VGG-C, RigL-ITOP": Case("vgg_c-rigl-itop", epochs=10, against=SGD, limit=1.03),
    "VGG-16 99 %, static": Case(VGG16, STANDARD),
    "VGG-16, BSR-Net": Case(VGG16, (), 3, "VGG-16 99 %, static", 1.15),
    "VGG-16, static, PGD-10 AT": Case(VGG16, (*STANDARD, "objective=at"), 2, "VGG-16 99 %, static", 9.0),
    "VGG-16, static, AT, AGENT, running": Case(
        VGG16, (*STANDARD, "objective=at", AGENT, "correction.mode=running"), 2, "VGG-16, static, PGD-10 AT", 1.20
    ),
    "VGG-16, static, AT, AGENT, recompute": Case(
        VGG16, (*STANDARD, "objective=at", AGENT, "correction.mode=recompute"), 2, "VGG-16, static, PGD-10 AT"
    ),
    "ResNet-50, CIFAR-100, dense": Case("resnet50-rigl-cifar100", ("topology=dense",), 2),
    "ResNet-50, CIFAR-100, RigL 90 %": Case("resnet50-rigl-cifar100", (), 2, "ResNet-50, CIFAR-100, dense", 1.05),
}


class Timed(Trainer):
    """A trainer that does not evaluate."""

    def evaluate(self, split: str | None = None) -> dict[str, Score]:
        return {"plain": Score(0.0, 0.0, 0)}


class Timing(NamedTuple):
    """Seconds per epoch, seconds from the start to the end of the first step, and peak bytes."""

    epoch: float
    first: float
    memory: int


def measure(case: Case, data: str, extra: list[str]) -> Timing:
    started = time.perf_counter()
    raw = apply_overrides(read_recipe(case.recipe), [*case.overrides, f"data.root={data}", *extra])
    trainer = Timed(make_recipe(raw))
    torch.cuda.reset_peak_memory_stats()
    trainer.parts.model.train()
    if not trainer.parts.engine.captures:
        print("  not captured")
    trainer.take_step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    for _ in range(WARM):
        trainer.run_epoch()
    before = trainer.seconds
    for _ in range(case.epochs):
        trainer.run_epoch()
    seconds = (trainer.seconds - before) / case.epochs
    print("  loss", *(round(line["train_loss"], 3) for line in trainer.history[-2:]), flush=True)
    return Timing(seconds, first, trainer.history[-1]["peak_memory"])


def start_up(data: str) -> list[float]:
    """Seconds of fresh processes from the start to the end of the first step, with what is compiled already."""
    code = (
        "import torch\nfrom equipoise.training import *\n"
        f"t = Trainer(make_recipe(apply_overrides(read_recipe('vgg_c-set-itop'), ['data.root={data}'])))\n"
        "t.parts.model.train(); t.take_step(); torch.cuda.synchronize()"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def fill_in(folder: Path) -> Path:
    """A folder with both datasets: links to what is there, random pixels for what is not."""
    made = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    layouts = {"cifar-10-batches-py": (10, [f"data_batch_{k}" for k in range(1, 6)], "test_batch", "labels")}
    layouts["cifar-100-python"] = (100, ["train"], "test", "fine_labels")
    for name, (classes, train, test, key) in layouts.items():
        if (folder / name).is_dir():
            (made / name).symlink_to((folder / name).resolve())
            continue
        print(f"{name} is not in {folder}: random images")
        (made / name).mkdir()
        sizes = {file: 50_000 // len(train) for file in train} | {test: 10_000}
        for file, size in sizes.items():
            pixels = rng.integers(256, size=(size, 3072), dtype=np.uint8)
            content = {b"data": pixels, key.encode(): rng.integers(classes, size=size).tolist()}
            (made / name / file).write_bytes(pickle.dumps(content, protocol=2))
        names = {"cifar-10-batches-py": ("batches.meta", b"label_names")}.get(name, ("meta", b"fine_label_names"))
        (made / name / names[0]).write_bytes(pickle.dumps({names[1]: [str(c) for c in range(classes)]}, protocol=2))
    return made


def table(timings: dict[str, Timing], starts: list[float]) -> str:
    lines = [
        "| CIFAR, batch 128 | seconds per epoch | ratio | at most | images/s | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, timing in timings.items():
        case = CASES[name]
        base = timings.get(case.against)
        ratio = timing.epoch / base.epoch if base else 0.0
        limit = "" if not case.limit else (f"{case.limit:.2f} ×" if case.against else f"{case.limit:.2f} s")
        lines.append(
            f"| {name} | {timing.epoch:.3f} | {f'{ratio:.2f} ×' if base else ''} | {limit} | "
            f"{50_000 / timing.epoch:,.0f} | {timing.memory / 2**30:.1f} GiB |"
        )
    if starts:
        each = ", ".join(f"{seconds:.1f}" for seconds in starts)
        lines += [
            "",
            f"Start-up to the first step, warm compile cache, three processes: {each} s (at most 20).",
        ]
    return "\n".join(lines)


def heading(commit: str) -> str:
    if not commit:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = found.stdout.strip() or "unknown"
    return (
        f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, commit {commit}; bf16; `bench/gpu.py`."
    )


def write(text: str) -> None:
    """Replace the section of docs/benchmarks.md that this file owns."""
    begin, end = "<!-- gpu -->", "<!-- /gpu -->"
    page = ROOT / "docs" / "benchmarks.md"
    page.parent.mkdir(exist_ok=True)
    old = page.read_text() if page.exists() else "# Benchmarks\n"
    before, _, rest = old.partition(begin)
    after = rest.partition(end)[2] if rest else "\n"
    page.write_text(f"{before.rstrip()}\n\n{begin}\n## Training on a GPU\n\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every case, such as engine=eager")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--commit", default="", help="the commit, where there is no git to ask")
    arguments = parser.parse_args()
    data = str(fill_in(arguments.data))
    timings = {}
    for name, case in CASES.items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        begun = time.perf_counter()
        timings[name] = measure(case, data, arguments.set)
        print(f"{name}: {timings[name]}, {time.perf_counter() - begun:.0f} s in all", flush=True)
    starts = [] if arguments.only else start_up(data)
    text = f"{heading(arguments.commit)}\n\n{table(timings, starts)}"
    print(text)
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
