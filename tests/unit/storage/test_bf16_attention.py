"""Attention of packed models with bf16 activations: where it is replaced, where it is not, and what follows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from equipoise.deploy.frozen import freeze, is_frozen
from equipoise.storage import bf16_attention
from equipoise.storage.bf16_attention import calls_attention, scaled_dot_product_attention
from equipoise.storage.pack import blocked_modules
from equipoise.topology.packing import pack

ROUNDING = 2.0**-8  # largest relative error of rounding to bf16
WIDTH = 32


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small attention counts, on any machine."""
    monkeypatch.setattr(bf16_attention, "has_fast_bf16", lambda: True)
    monkeypatch.setattr(bf16_attention, "LEAST_TOKENS", 1)
    monkeypatch.setattr(bf16_attention, "LEAST_PRODUCTS", 1)
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """Self-attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(q, k, v).transpose(1, 2).reshape(batch, tokens, width))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Readable(nn.Module):
    """A model whose source is a sequence of known calls, with attention in it and in a module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(self.one(x), self.two(x), x)
        return x + self.attention(x, x, x, need_weights=False)[0]


def of_torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the number of attentions
    "blocks": (lambda: nn.Sequential(Block(), Block()), 2),
    "readable": (Readable, 2),
    "of torch": (of_torch, 1),
}


def packed(model: nn.Module, precision: str = "bf16") -> nn.Module:
    torch.manual_seed(1)
    masks = {name: torch.rand(p.shape) < 0.2 for name, p in model.named_parameters() if p.dim() > 1}
    return pack(model, masks, precision)


def both(name: str) -> tuple[nn.Module, nn.Module]:
    """A packed model in float32 and in bf16."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return packed(model, "float32"), packed(model)


def tokens() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2, 24, WIDTH)


class Calls(TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self, name: str = "equipoise::attention") -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name() == self.name
        return function(*args, **(kwargs or {}))


def calls(run: Callable[[], Any]) -> int:
    with Calls() as counted:
        run()
    return counted.count


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        # gradients of biases of keys are zero up to rounding
        assert (mine - theirs).norm() <= 6 * ROUNDING * theirs.norm() + 1e-4


# -- models


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_attention_in_bf16(name: str) -> None:
    plain, half = both(name)
    x = tokens()
    assert calls(lambda: plain(x)) == 0
    assert calls(lambda: half(x)) == MODELS[name][1]
    found, expected = outcome(half, x), outcome(plain, x)
    assert not torch.equal(found[0], expected[0])
    assert_close(found, expected)


def test_a_child_alone_and_a_call_in_a_thread() -> None:
    _, model = both("blocks")
    x = tokens()
    expected = outcome(model, x)
    assert calls(lambda: model[0](x)) == 1
    assert calls(lambda: model[0].attention(x)) == 1
    assert calls(lambda: F.scaled_dot_product_attention(x, x, x)) == 0
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(calls, [lambda: model(x)] * 8)) == [2] * 8
        for found in pool.map(lambda _: outcome(model, x), range(8)):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", MODELS)
def test_copies(name: str) -> None:
    _, model = both(name)
    x = tokens()
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert calls(lambda twin=twin: twin(x)) == MODELS[name][1]
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_models(name: str) -> None:
    _, model = both(name)
    x = tokens()
    frozen = freeze(model)
    assert calls(lambda: frozen(x)) == MODELS[name][1]
    with torch.inference_mode():
        assert torch.allclose(frozen(x), model.eval()(x), atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_compiled_models(name: str) -> None:
    _, model = both(name)
    x = tokens()
    expected = outcome(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(outcome(compiled, x), expected)
    with torch.profiler.profile() as profile:  # the compiler refuses other modes
        compiled(x)
    assert sum(event.name == "equipoise::attention" for event in profile.events()) == MODELS[name][1]


class Convolutions(nn.Module):
    """Convolutions, and attention between the positions of their map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x))).flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).mean(1)


def test_models_in_the_blocked_layout() -> None:
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(32, 3, 6, 6)
    plain, half = packed(model, "float32"), packed(model)
    assert blocked_modules(half) == [""]
    half(x)  # the first batch is computed twice
    compiled = torch.compile(half, fullgraph=True, backend="aot_eager")
    frozen = freeze(half)
    assert is_frozen(frozen)
    for run in (half, compiled, frozen):
        run(x)
        with torch.profiler.profile() as profile:
            assert_close([run(x)], [plain(x)])
        assert sum(event.name == "equipoise::attention" for event in profile.events()) == 1


def test_exported_models_leave_attention_to_torch() -> None:
    _, model = both("blocks")
    frozen, x = freeze(model), tokens()
    program = torch.export.export(frozen, (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert not any("equipoise.attention" in target for target in targets)
    assert_close([program.module()(x)], [frozen(x)])


def test_autocast_does_what_it_does_without_packing() -> None:
    plain, half = both("blocks")
    x = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(lambda: half(x)) == 0
        assert torch.equal(half(x), plain(x))


def test_machines_without_fast_bf16_keep_the_attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, half = both("readable")
    monkeypatch.setattr(bf16_attention, "has_fast_bf16", lambda: False)
    x = tokens()
    assert calls(lambda: half(x)) == 0
    assert torch.equal(half(x), plain(x))


@pytest.mark.parametrize("name", ["blocks", "of torch"])
def test_training(name: str) -> None:
    """The losses of both precisions fall together."""
    losses = []
    for model in both(name):
        torch.manual_seed(3)
        x = torch.randn(8, 16, WIDTH)
        y = x.cumsum(1) / torch.arange(1, 17).view(16, 1)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append([F.mse_loss(x, y).item(), loss.item()])
    (before, plain), (_, half) = losses
    assert plain < 0.8 * before
    assert half == pytest.approx(plain, rel=0.03)


# -- which modules


def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


TABLE: dict[str, Callable[..., Tensor]] = {"mix": mix}


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mix(x, x, x)


class ByTable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return TABLE["mix"](x, x, x)


class Inherited(Attention):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x) + super().mix(x, x, x)


class Checkpointed(Attention):
    """Runs its attention again in the backward pass, outside of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = checkpoint(self.mix, q, k, v, use_reentrant=False)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Outside(nn.Module):
    """Runs a whole module again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [Attention, Inherited, ByFunction, ByTable, nn.MultiheadAttention])
def test_modules_that_call_attention(kind: type[nn.Module]) -> None:
    assert calls_attention(kind)


@pytest.mark.parametrize("kind", [Block, Checkpointed, Outside, nn.Linear, nn.TransformerEncoderLayer, nn.Module])
def test_modules_that_do_not(kind: type[nn.Module]) -> None:
    assert not calls_attention(kind)


@pytest.mark.parametrize(("kind", "count"), [(Checkpointed, 0), (Outside, 1)])
def test_checkpoints(kind: type[nn.Module], count: int) -> None:
    torch.manual_seed(0)
    model = kind()
    half, plain, x = packed(model), packed(model, "float32"), tokens()
    assert calls(lambda: half(x)) == count
    assert_close(outcome(half, x), outcome(plain, x))


# -- calls that are left to torch


def heads(queries: int = 24, keys: int = 24, count: int = 2, channels: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, count, queries, channels), (2, 2, keys, channels), (2, 2, keys, channels)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


LEFT: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any]]] = {
    "dropout": (heads, {"dropout_p": 0.5}),
    "grouped queries": (lambda: heads(count=4), {"enable_gqa": True}),
    "float64": (lambda: [x.double() for x in heads()], {}),
    "bf16": (lambda: [x.bfloat16() for x in heads()], {}),
    "shapes that broadcast": (lambda: [x[:1] if at else x for at, x in enumerate(heads())], {}),
    "two dimensions": (lambda: [x[0, 0] for x in heads()], {}),
    "five dimensions": (lambda: [x[None] for x in heads()], {}),
    "a trained mask": (heads, {"attn_mask": torch.randn(24, 24, requires_grad=True)}),
    "two masks": (heads, {"attn_mask": torch.ones(24, 24, dtype=torch.bool), "is_causal": True}),
    "many keys": (lambda: heads(2, bf16_attention.MOST_KEYS + 1), {}),
    "no keys": (lambda: heads(3, 0), {}),
}


@pytest.mark.parametrize("name", LEFT)
def test_calls_that_are_left_to_torch(name: str) -> None:
    make, options = LEFT[name]
    given = make()
    assert calls(lambda: scaled_dot_product_attention(*given, **options)) == 0
    torch.manual_seed(5)
    found = scaled_dot_product_attention(*given, **options)
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(*given, **options)
    assert torch.equal(found, expected)
    pairs = (torch.autograd.grad(out.float().square().sum(), given) for out in (found, expected))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*pairs, strict=True))


def test_small_calls_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = heads(64, 64)
    assert calls(lambda: scaled_dot_product_attention(*given)) == 1
    monkeypatch.setattr(bf16_attention, "LEAST_PRODUCTS", 2 * 2 * 64 * 64 * 16 + 1)
    assert calls(lambda: scaled_dot_product_attention(*given)) == 0
    monkeypatch.setattr(bf16_attention, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(bf16_attention, "LEAST_TOKENS", 65)
    assert calls(lambda: scaled_dot_product_attention(*given)) == 0


@pytest.mark.parametrize(
    "mask", [torch.ones(24, 23, dtype=torch.bool), torch.ones(24, 24, dtype=torch.int), torch.ones(24)]
)
def test_wrong_masks_raise_as_in_torch(mask: Tensor) -> None:
    given = heads()
    with pytest.raises((RuntimeError, IndexError)) as mine:
        scaled_dot_product_attention(*given, mask)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        F.scaled_dot_product_attention(*given, mask)
    assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.1},
        {"attn_mask": torch.rand(24, 24) > 0.5},
        {"attn_mask": torch.randn(24, 24)},
    ],
)
@pytest.mark.parametrize("dimensions", [3, 4])
def test_calls_in_bf16(options: dict[str, Any], dimensions: int) -> None:
    given = [x.flatten(0, 4 - dimensions) if dimensions == 3 else x for x in heads()]
    assert calls(lambda: scaled_dot_product_attention(*given, **options)) == 1
    found, expected = (f(*given, **options) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert_close([found], [expected])
