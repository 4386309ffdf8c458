"""Files of tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from equipoise.tensor_files import save_file

WRITER = """
import sys
from pathlib import Path

import torch

from equipoise.training.checkpoint import save

save(Path(sys.argv[1]), {"x": torch.zeros(60_000_000)})
"""


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x", {"key": "value"})
    read = load_file(tmp_path / "x")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"key": "value"}


def test_a_checkpoint_has_no_other_temporary_file_than_those_that_a_resumed_run_removes(tmp_path: Path) -> None:
    """A process that is killed leaves the files that exist while it writes: look at them from outside."""
    path, seen = tmp_path / "a.safetensors", set()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    while writer.poll() is None:
        seen.update(os.listdir(tmp_path))
    assert writer.returncode == 0
    temporary = seen - {path.name}
    assert temporary, "the file was written before anybody looked"
    assert all(name.startswith(f".{path.name}.") and name.endswith(".tmp") for name in temporary)
