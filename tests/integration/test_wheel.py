"""The wheel: one for every Python, with a library that needs no compiler where it is installed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="the wheel has a library on Linux only")

TRAIN = """
import torch, equipoise as eq
from equipoise.kernels import build, library
print(build.find())
assert library.available()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
algorithm = eq.SET(sparsity=0.95, every=5)
model = eq.sparse.pack(model, algorithm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
topology = algorithm.attach(model, optimizer, total_steps=30)
x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))
losses = []
for _ in range(30):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
assert topology.storage == "packed" and topology.updates and losses[-1] < losses[0]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (built,) = folder.glob("*.whl")
    return built


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_fits_every_python_and_old_systems(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("equipoise/kernels/_kernels.so", tmp_path)
        charts = {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"}
        assert {f"equipoise/report/vendor/{file}" for file in charts} <= set(archive.namelist())
    read = subprocess.run(
        ["readelf", "--version-info", "--dynamic", library], capture_output=True, text=True, check=True
    )
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", read.stdout)]
    assert versions
    assert max(versions) <= (2, 28)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", read.stdout)
    assert not [name for name in needed if "python" in name or "torch" in name]


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_trains_packed_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    # The packages that equipoise needs come from here, equipoise itself from the wheel.
    code = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n{TRAIN}"
    environment = {
        "PATH": str(tmp_path / "empty"),
        "PYTHONPATH": str(tmp_path / "site"),
        "EQUIPOISE_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH") if name in os.environ}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command, env={**environment, **kept}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "site/equipoise/kernels/_kernels.so")
    assert not (tmp_path / "cache").exists()
