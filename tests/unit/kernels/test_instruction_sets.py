"""The kernel tests again on a library built for one instruction set, as the run-time choice would pick it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.kernels import build

TESTS = Path(__file__).parent
LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}  # what the machine must have


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_of_every_level(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    if LEVELS[level] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this machine has no {LEVELS[level]}")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    registers = "" if level == "x86-64-v4" else " -DEQ_ACCUMULATORS=8"
    monkeypatch.setenv("EQUIPOISE_CFLAGS", f"-DEQ_NO_CLONES -march={level}{registers}")
    environment = {**os.environ, "EQUIPOISE_KERNELS": str(build.compiled()), "OMP_NUM_THREADS": "2"}
    names = (
        "test_operators.py",
        "test_half.py",
        "test_blocks.py",
        "test_linear.py",
        "test_steps.py",
        "test_spread.py",
    )
    tests = [str(TESTS / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parents[2])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
