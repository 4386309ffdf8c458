"""Size and speed of exported models next to PyTorch and onnxruntime, as `equipoise bench` measures them.

    python bench/deploy.py [--sparsity 0.9 0.95 0.99] [--repeats 15] [--threads 2] [--cpu-time]

VGG-C with random weights and ERK densities: times and sizes do not depend on what a network has learned. Writes
bench/results/deploy.json, from which `python tools/charts.py` draws docs/deploy.png. On a shared machine, `--threads 1
--cpu-time` counts the time of this process only.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from cpu import random_masks
from equipoise.deploy import Blueprint, Network, onnx_model, write_packed
from equipoise.deploy.benchmark import bench, packed_subject
from equipoise.models.vgg import vgg_c

BLUEPRINT = Blueprint("vgg_c", {"classes": 10, "channels": 3}, (3, 32, 32), (0.0,) * 3, (1.0,) * 3)


def measure(sparsity: float, repeats: int, threads: int, cpu_time: bool) -> dict[str, Any]:
    """Export a model of this sparsity and measure it."""
    model = vgg_c()
    with torch.no_grad():
        for name, mask in random_masks(model, sparsity).items():
            model.get_parameter(name).mul_(mask)
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "net.safetensors", Path(folder) / "int8.safetensors"
        write_packed(Network(BLUEPRINT, model.state_dict()), file)
        write_packed(Network(BLUEPRINT, model.state_dict()), small, values="int8")
        subject = packed_subject(file)
        onnx_model.write_model(subject.model, subject.input_shape, Path(folder) / "net.onnx")
        sizes = {"int8_bytes": small.stat().st_size, "onnx_bytes": (Path(folder) / "net.onnx").stat().st_size}
        clock = time.process_time if cpu_time else time.perf_counter
        report = bench(subject, repeats, threads, clock)
        return {"model": "VGG-C", "sparsity": sparsity, "cpu_time": cpu_time, **asdict(report), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of this process instead of wall time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "deploy.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    place = {"date": str(date.today()), "torch": torch.__version__, "python": platform.python_version()}
    place |= {"instructions": torch.backends.cpu.get_cpu_capability(), "commit": commit or "unknown"}
    found = []
    for sparsity in arguments.sparsity:
        found.append(measure(sparsity, arguments.repeats, arguments.threads, arguments.cpu_time) | place)
        print(json.dumps(found[-1]), flush=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
