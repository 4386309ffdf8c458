"""bench/gpu_compare.py: processes of two checkouts take turns, and a table compares their medians."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "bench" / "gpu_compare.py"
# Stands for bench/gpu.py of a checkout whose n-th epoch takes n * UNIT seconds.
GPU = """
from datetime import datetime
from types import SimpleNamespace as Names

CASES = {name: Names(recipe=name, overrides=()) for name in ("first case", "second case", "broken")}
config = Names()
torch = Names(
    __version__="0",
    _dynamo=Names(config=config),
    cuda=Names(synchronize=lambda: None, get_device_name=lambda: "none"),
)
read_recipe = make_recipe = fill_in = lambda value: value
apply_overrides = lambda recipe, overrides: recipe


class Timed:
    parts = Names(model=Names(train=lambda: None))

    def __init__(self, recipe):
        if recipe == "broken":
            raise SystemExit
        self.seconds, self.epochs = 0.0, 0

    def run_epoch(self):
        self.epochs += 1
        self.seconds += UNIT * self.epochs
"""


def compare(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name, unit in (("before", 1), ("after", 2)):
        (tmp_path / name / "bench").mkdir(parents=True)
        (tmp_path / name / "bench" / "gpu.py").write_text(f"UNIT = {unit}\n{GPU}")
    # run from the first checkout, so that its gpu.py is next to the script
    script = tmp_path / "before" / "bench" / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    command = [sys.executable, str(script), "before", "after", "--only", "case", "--out", "out.json", *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)


def test_checkouts_take_turns_and_run_their_own_code(tmp_path: Path) -> None:
    done = compare(tmp_path, "--rounds", "3", "--processes", "2")
    assert done.returncode == 0, done.stderr
    # the two epochs before the clock starts take 1 and 2 units; those of the three rounds 3, 4 and 5
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["seconds"] == {name: [[3, 4, 5], [6, 8, 10]] for name in ("first case", "second case")}
    assert done.stdout.splitlines()[-4:] == [
        "| CIFAR, batch 128, seconds per epoch | before | after | ratio |",
        "|---|---|---|---|",
        "| first case | 4.000 | 8.000 | 2.000 |",
        "| second case | 4.000 | 8.000 | 2.000 |",
    ]


def test_a_process_that_stops_ends_the_comparison(tmp_path: Path) -> None:
    done = compare(tmp_path, "--only", "broken")
    assert done.returncode == 1
    assert "the process of broken has stopped" in done.stderr
