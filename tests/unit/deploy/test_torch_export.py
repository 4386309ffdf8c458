"""torch.export of frozen models: the program gives the same numbers, also after saving and loading."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.deploy.frozen import freeze
from equipoise.kernels import library
from sparse_helpers import convolutions, linear, packed_model, sequences

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Attends(nn.Module):
    """A block of a transformer with torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convolutions, (5, 1, 8, 8)),
    "linear": (linear, (5, 12)),
    "sequences": (sequences, (5, 3, 9)),
    "attention": (Attends, (5, 4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_model_is_exported_saved_and_loaded(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    frozen, x = freeze(packed_model(make())), torch.randn(shape)
    wanted = frozen(x)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(frozen, (x,), dynamic_shapes=({0: batch},))
    operators = {str(node.target) for node in program.graph.nodes}
    assert {"equipoise.conv.default", "equipoise.linear.default"} & operators
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for found in (program, torch.export.load(file)):
        torch.testing.assert_close(found.module()(x), wanted)
        other = torch.randn(7, *shape[1:])
        torch.testing.assert_close(found.module()(other), frozen(other))


@pytest.mark.slow
def test_another_process_loads_a_program(tmp_path: Path) -> None:
    frozen, x = freeze(packed_model(convolutions())), torch.randn(5, 1, 8, 8)
    torch.export.save(torch.export.export(frozen, (x,)), tmp_path / "net.pt2")
    torch.save((x, frozen(x)), tmp_path / "data.pt")
    code = (
        "import torch, equipoise.sparse\n"
        "x, wanted = torch.load('data.pt')\n"
        "torch.testing.assert_close(torch.export.load('net.pt2').module()(x), wanted)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
