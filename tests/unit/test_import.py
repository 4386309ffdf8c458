"""`import equipoise`: the packages it loads and the names it exports."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import equipoise as eq

# Packages that the application layers and the extras use, and that the library must not import.
APPLICATION = (
    "yaml", "rich", "typer", "click", "matplotlib", "sklearn", "scipy", "PIL", "pandas", "tensorboard",
    "pyautoattack", "onnx", "onnxscript", "onnxruntime", "ray", "lightning", "transformers", "torchvision",
    "msgspec", "pydantic",
)  # fmt: skip


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a new interpreter has loaded after a statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_the_packages_of_the_library_only() -> None:
    loaded = modules_after("import equipoise; equipoise.RigL")
    assert {"torch", "numpy", "safetensors"} <= loaded
    of_torch = modules_after("import torch, numpy, safetensors.torch")
    assert sorted(name for name in APPLICATION if name in loaded - of_torch) == []


def test_the_command_line_starts_before_torch_is_loaded() -> None:
    """So that it can say at once what it waits for."""
    assert not {"torch", "numpy", "matplotlib", "yaml"} & modules_after("from equipoise.cli import main")


def test_unknown_names_are_refused_and_subpackages_found() -> None:
    assert {"RigL", "fast", "load", "__version__"} <= set(dir(eq))
    assert eq.topology.RigL is eq.RigL  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'equipoise' has no attribute 'Nothing'"):
        eq.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_facade_of_packed_models() -> None:
    assert set(eq.sparse.__all__) == {"available", "describe", "freeze", "pack", "reason", "report", "unpack"}
    assert all(callable(getattr(eq.sparse, name)) for name in eq.sparse.__all__)
    assert eq.sparse.available() is (eq.sparse.reason() == "")


def test_every_public_name_exists_and_is_documented() -> None:
    assert all(getattr(eq, name).__doc__ for name in eq.__all__)


def test_the_version_has_one_source() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "equipoise.__version__"}
    assert eq.__version__
