"""What a training run does before its steps are fast, in seconds: one fresh process for each line of output.

    PYTHONPATH=src python3 bench/startup.py --data FOLDER [--recipe vgg_c-fast] [--repeats 3] [--train 8] [--profile]

The first process fills the compile cache; the others are what users see. `--train N` then runs `equipoise train` for N
epochs as a user does: seconds of the whole process, of training, and of compiling and capturing. `--profile` prints the
functions that take longest in the last process.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 5  # run, recorded, replayed, and the first of other sizes


def child(recipe: str, overrides: list[str], profile: bool) -> None:
    """Print the seconds of each stage as JSON."""
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    stages: dict[str, float] = {}
    last = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        stages[name] = round(now - last, 2)
        last = now

    import torch

    stage("import torch")
    from equipoise.training import Trainer, apply_overrides, make_recipe, parts, read_recipe

    stage("import equipoise")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda").add_(1).cpu()
    stage("CUDA context")
    load, made = parts.load, make_recipe(apply_overrides(read_recipe(recipe), overrides))

    def timed_load(*arguments: object) -> object:
        stage("recipe")
        found = load(*arguments)  # type: ignore[arg-type]
        stage("data")
        return found

    parts.load = timed_load  # type: ignore[assignment]
    trainer = Trainer(made)
    stage("model, topology, engine")
    trainer.parts.model.train()
    for number in range(1, STEPS + 1):
        trainer.take_step()
        if on_gpu:
            torch.cuda.synchronize()
        stage(f"step {number}")
    while not trainer.parts.topology.update_is_next:
        trainer.take_step()
    if on_gpu:
        torch.cuda.synchronize()
    stage("steps to the first update")
    for _ in range(2):
        trainer.take_step()
    if on_gpu:
        torch.cuda.synchronize()
    stage("first update and the step after it")
    trainer.evaluate()
    stage("first evaluation")
    trainer.evaluate()
    stage("second evaluation")
    print(json.dumps(stages))
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(90)
        print(torch._dynamo.utils.compile_times(repr="str", aggregate=True), file=sys.stderr)


def measure_start(command: list[str]) -> dict[str, Any]:
    """Run a child process and return the seconds of its stages."""
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    total = time.perf_counter() - started
    stages = json.loads(done.stdout.splitlines()[-1])
    steps = sum(seconds for name, seconds in stages.items() if "evaluation" not in name and "steps" not in name)
    return {"to_fast_steps": round(steps, 1), "process": round(total, 1), "stages": stages}


def measure_training(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Run `equipoise train` and return the seconds of the process and those that the run has counted."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "equipoise", "train", recipe, *overrides, "--out", str(run)]
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.PIPE, check=True)
        total = time.perf_counter() - started
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    counted = {key: round(last[key], 1) for key in ("seconds", "startup_seconds")}
    return {"train": recipe, "epochs": last["epoch"], "process": round(total, 1), **counted, "scores": last["scores"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--recipe", default="vgg_c-fast")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the recipe")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", type=int, default=0, help="epochs of whole trainings; 0 for none")
    parser.add_argument("--trainings", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    overrides = [f"data.root={arguments.data}", *arguments.set]
    if arguments.child:
        child(arguments.recipe, overrides, arguments.profile)
        return

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    command = [sys.executable, __file__, "--child", "--data", arguments.data, "--recipe", arguments.recipe]
    command += ["--set", *arguments.set] if arguments.set else []
    for repeat in range(arguments.repeats):
        last = repeat == arguments.repeats - 1
        tell(measure_start([*command, "--profile"] if arguments.profile and last else command))
    for _ in range(arguments.trainings if arguments.train else 0):
        tell(measure_training(arguments.recipe, [*overrides, f"epochs={arguments.train}"]))


if __name__ == "__main__":
    main()
