"""The kernels and exported C sources on aarch64, by a cross compiler and an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from deploy_helpers import images, random_network
from equipoise.deploy.export import export
from equipoise.kernels import build

HELPERS = Path(__file__).parents[2] / "helpers"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER} or {EMULATOR}"
    ),
]


def sources() -> list[str]:
    return [str(path) for path in sorted(build.SOURCES.glob("*.c"))]


def test_the_library_is_compiled_without_warnings(tmp_path: Path) -> None:
    command = [COMPILER, *build.FLAGS, "-Wall", "-Werror", "-shared", "-o", str(tmp_path / "kernels.so"), *sources()]
    subprocess.run(command, check=True)


def test_the_linear_kernels_compute_what_they_should(tmp_path: Path) -> None:
    program = tmp_path / "check"
    check = [f"-I{build.SOURCES}", str(HELPERS / "linear_check.c")]
    subprocess.run([COMPILER, *build.FLAGS, "-static", *check, *sources(), "-lm", "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", ["float32", "int8"])
def test_an_exported_network_gives_the_logits_of_pytorch(values: str, tmp_path: Path) -> None:
    network, judge = random_network("small", 0.9)
    export(network, tmp_path / "net.c", "c", values)
    subprocess.run([COMPILER, "-O2", "-static", "-o", tmp_path / "net", tmp_path / "net.c", "-lm"], check=True)
    x = images(network, 3)
    printed = subprocess.run(
        [EMULATOR, tmp_path / "net"], input=x.contiguous().numpy().tobytes(), capture_output=True, check=True
    ).stdout.decode()
    found = torch.tensor([[float(number) for number in line.split()] for line in printed.splitlines()])
    expected = judge(x.double())
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < {"float32": 1e-5, "int8": 0.05}[values]
