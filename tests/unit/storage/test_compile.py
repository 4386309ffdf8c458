"""torch.compile of packed models: one graph, and the numbers of the eager model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.kernels import library
from equipoise.storage.packed_modules import PackedLayer
from sparse_helpers import convolutions, linear, packed_model, sequences

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def outcome(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result, gradients of input and parameters, and buffers after one call."""
    x = x.clone().requires_grad_()
    out = run(x)
    gradients = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    return [out, *gradients, *(buffer.clone() for buffer in model.buffers() if buffer.is_floating_point())]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: nn.Sequential(Block(), Block()), (2, 5, 16)),
    "linear": (linear, (5, 12)),
    "convolutions": (convolutions, (5, 1, 8, 8)),
    "sequences": (sequences, (5, 3, 9)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_compiles_to_one_graph_before_and_after_rewiring(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = packed_model(make()), torch.randn(shape)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for fewer in (0, 3):
        for layer in model.modules():
            if isinstance(layer, PackedLayer):
                layer.rewire(layer.index[fewer:], layer.values.detach()[fewer:])
        wanted = outcome(model, model, x)
        for found, value in zip(outcome(compiled, model, x), wanted, strict=True):
            torch.testing.assert_close(found, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_default_compiler_gives_the_same_numbers(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = packed_model(make()), torch.randn(shape)
    wanted = outcome(model, model, x)
    for found, value in zip(outcome(torch.compile(model, fullgraph=True), model, x), wanted, strict=True):
        torch.testing.assert_close(found, value)
