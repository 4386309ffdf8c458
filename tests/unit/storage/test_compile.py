"""torch.compile of packed models: one graph, and the numbers of the eager model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from equipoise.deploy.frozen import freeze
from equipoise.kernels import library
from equipoise.storage.pack import blocked_modules
from equipoise.storage.packed_modules import PackedLayer
from equipoise.topology import GMP
from equipoise.topology.packing import pack
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


def operators_in(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Names of the package's operators in the one graph of a compiled model."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found.extend(name for name in names if name.startswith("equipoise."))
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    return found


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_a_convolutional_network_is_one_operator_that_stays_in_the_blocked_layout(training: bool) -> None:
    torch.manual_seed(0)
    eager, x = packed_model(network()).train(training), torch.randn(17, 3, 6, 6)
    assert blocked_modules(eager) == [""]
    model = copy.deepcopy(eager)
    assert operators_in(copy.deepcopy(model), x) == ["equipoise.blocked.default"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):  # statistics of BatchNorm change from step to step
        for found, value in zip(outcome(compiled, model, x), outcome(eager, eager, x), strict=True):
            torch.testing.assert_close(found, value)
        for buffer, other in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(buffer, other)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))


def test_compiled_code_sees_weights_that_change_inside_it() -> None:
    """The operator takes its weights as arguments and not from the module."""
    torch.manual_seed(0)
    model, x = packed_model(network()).eval(), torch.randn(17, 3, 6, 6)
    twice = copy.deepcopy(model)

    def run(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        first = net(x)
        for parameter in net.parameters():
            parameter.mul_(2)
        return first, net(x)

    with torch.no_grad():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(model, x)
        wanted = run(twice, x)
    torch.testing.assert_close(found, wanted)


def test_gradients_of_inactive_weights_are_recorded_in_compiled_code() -> None:
    torch.manual_seed(0)
    eager, x = packed_model(network()).eval(), torch.randn(17, 3, 6, 6)
    model = copy.deepcopy(eager)
    for net, run in ((eager, eager), (model, torch.compile(model, backend="aot_eager", fullgraph=True))):
        for layer in net.modules():
            if isinstance(layer, PackedLayer):
                layer.open_probe()
        run(x).square().sum().backward()
    for mine, other in zip(model.modules(), eager.modules(), strict=True):
        if isinstance(mine, PackedLayer) and isinstance(other, PackedLayer):
            assert mine.probe is not None
            assert other.probe is not None
            assert torch.count_nonzero(other.probe.grad)
            torch.testing.assert_close(mine.probe.grad, other.probe.grad)


def test_a_frozen_network_compiles() -> None:
    model, x = freeze(packed_model(network())), torch.randn(17, 3, 6, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for images in (x, x[:1]):
        torch.testing.assert_close(compiled(images), model(images))


def test_the_operators_are_registered_completely() -> None:
    torch.manual_seed(0)
    model, x = packed_model(network()).train(), torch.randn(17, 3, 6, 6, requires_grad=True)
    calls: list[tuple[Any, ...]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*args: Any) -> object:
            values: dict[torch.fx.Node, Any] = {}
            given = iter(args)
            for node in graph.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(given)
                elif str(node.target) == "equipoise.blocked.default":
                    calls.append(torch.fx.node.map_arg(node.args, values.__getitem__))
            return graph.forward(*args)

        return run

    torch.compile(model, backend=backend, fullgraph=True)(x)
    inputs, tensors, wanted, training, key = calls[0]
    operators = torch.ops.equipoise
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    torch.library.opcheck(
        operators.blocked.default, (inputs.detach().requires_grad_(), leaves, wanted, training, key)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_default_compiler_gives_the_same_numbers(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = packed_model(make()), torch.randn(shape)
    wanted = outcome(model, model, x)
    for found, value in zip(outcome(torch.compile(model, fullgraph=True), model, x), wanted, strict=True):
        torch.testing.assert_close(found, value)


@torch._dynamo.config.patch(force_parameter_static_shapes=False, force_nn_module_property_static_shapes=False)
def test_changing_numbers_of_weights_need_few_graphs() -> None:
    """With the settings that docs/guides/cpu.md names; torch else compiles for every number of active weights."""
    torch.manual_seed(0)
    algorithm = GMP(sparsity=0.9, every=1)
    model = pack(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)), algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = algorithm.attach(model, optimizer, total_steps=20)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x, counts = torch.randn(40, 24), set()
    for _ in range(20):
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.add(sum(layer.active for layer in topology.layers))
    assert len(counts) > 10
    assert counter.frame_count <= 4
