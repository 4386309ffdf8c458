"""Whether checkouts train equally fast on this GPU: seconds per epoch of the cases of bench/gpu.py, in turns.

    PYTHONPATH=src python3 bench/gpu_compare.py BEFORE [AFTER ...] [--names 5fe91b2 a3e1ca4] [--only NAME ...]

Each checkout has `src` and `bench/gpu.py`, whose cases it runs; this one is added if only BEFORE is given. Several
processes of each checkout compile and capture a share of the cases at the same time. Then one process runs at a time:
in every round each case runs an epoch of each checkout. The table has medians over the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WARM = 2  # epochs before the clock starts: compiling, capturing, the first snapshot
Timings = dict[str, list[list[float]]]  # case -> checkout -> seconds of each round


class Worker:
    """A process that trains some cases of a checkout, one epoch at each request.

    Args:
        checkout: The checkout.
        cases: Names of the cases.
        data: Folder of the datasets.
    """

    def __init__(self, checkout: Path, cases: list[str], data: Path) -> None:
        environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{checkout / 'bench'}"}
        # -P: without the folder of this file, whose gpu.py is not that of another checkout
        command = [sys.executable, "-P", __file__, "--data", str(data), "--worker", *cases]
        self.cases = cases
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> float:
        """Wait for the next number that the process prints: 0 once its cases are compiled, then seconds."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"the process of {', '.join(self.cases)} has stopped")

    def epoch(self, case: str) -> float:
        """Train a case for one epoch and return its seconds."""
        assert self._process.stdin is not None
        print(case, file=self._process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()


def serve(cases: list[str], data: Path) -> None:
    """Train the cases in this process, an epoch for each line of the input."""
    gpu: Any = importlib.import_module("gpu")  # of the checkout: names of recipe keys differ between versions
    gpu.torch._dynamo.config.recompile_limit = 64  # all cases stay compiled
    trainers = {}
    for name in cases:
        case = gpu.CASES[name]
        raw = gpu.apply_overrides(gpu.read_recipe(case.recipe), [*case.overrides, f"data.root={data}"])
        trainer = gpu.Timed(gpu.make_recipe(raw))
        trainer.parts.model.train()
        for _ in range(WARM):
            trainer.run_epoch()
        trainers[name] = trainer
    print("seconds 0", flush=True)
    for line in sys.stdin:
        trainer = trainers[line.strip()]
        before = trainer.seconds
        trainer.run_epoch()
        gpu.torch.cuda.synchronize()
        print("seconds", trainer.seconds - before, flush=True)


def compare(
    checkouts: list[Path],
    cases: list[str],
    data: Path,
    rounds: int,
    processes: int,
    out: Path | None,
    about: dict[str, Any],
) -> Timings:
    """Time every case in every checkout, and write `about` and the timings to `out` after every round."""
    shares = [cases[i::processes] for i in range(min(processes, len(cases)))]
    workers = [[Worker(checkout, share, data) for share in shares] for checkout in checkouts]
    for worker in (each for side in workers for each in side):
        worker.answer()
    timings: Timings = {name: [[] for _ in checkouts] for name in cases}
    for number in range(rounds):
        for i, name in enumerate(cases):
            for side in range(len(checkouts))[:: -1 if number % 2 else 1]:
                timings[name][side].append(workers[side][i % len(shares)].epoch(name))
            print(name, *(f"{seconds[-1]:.3f}" for seconds in timings[name]), flush=True)
        if out is not None:
            out.write_text(json.dumps(about | {"seconds": timings}, indent=1) + "\n")
    for worker in (each for side in workers for each in side):
        worker.stop()
    return timings


def table(names: list[str], timings: Timings) -> str:
    """Median seconds of every checkout, and their ratio to those of the first one."""
    others = " | ".join(f"{name} | ratio" for name in names[1:])
    lines = [f"| CIFAR, batch 128, seconds per epoch | {names[0]} | {others} |", "|---" * (2 * len(names)) + "|"]
    for name, sides in timings.items():
        first, *others = (statistics.median(seconds) for seconds in sides)
        told = (f"{second:.3f} | {second / first:.3f}" for second in others)
        lines.append(f"| {name} | {first:.3f} | {' | '.join(told)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="BEFORE [AFTER ...]")
    parser.add_argument("--names", nargs="*", default=[], help="their commits, for the table")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4, help="processes of each checkout")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, help="file for all timings")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.data)
        return
    gpu: Any = importlib.import_module("gpu")
    checkouts = [path.resolve() for path in arguments.checkouts]
    if len(checkouts) < 2:
        checkouts.append(ROOT)
    cases = [name for name in gpu.CASES if not arguments.only or any(word in name for word in arguments.only)]
    data = gpu.fill_in(arguments.data)
    names = arguments.names or [path.name for path in checkouts]
    device, torch = gpu.torch.cuda.get_device_name(), gpu.torch.__version__
    about = {"date": str(date.today()), "device": device, "torch": torch, "checkouts": names}
    timings = compare(checkouts, cases, data, arguments.rounds, arguments.processes, arguments.out, about)
    print(table(names, timings), flush=True)


if __name__ == "__main__":
    main()
