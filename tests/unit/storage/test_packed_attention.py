"""Packed attention against torch's, with the same zeros."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import SET, RigL
from equipoise.kernels import library
from equipoise.storage.pack import describe, unpack
from equipoise.topology.packing import pack

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


def pruned(model: nn.Module, density: float = 0.4) -> dict[str, Tensor]:
    """Random masks of all matrices, applied."""
    generator = torch.Generator().manual_seed(1)
    masks = {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "bias" not in name:
            masks[name] = torch.rand(weight.shape, generator=generator) < density
            weight.data *= masks[name]
    return masks


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, *args: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return self.attention(*args, **options)


CAUSAL = torch.triu(torch.ones(5, 5), 1).bool()
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
CALLS: list[dict[str, Any]] = [
    {},
    {"average_attn_weights": False},
    {"need_weights": False},
    {"attn_mask": CAUSAL},
    {"attn_mask": CAUSAL, "need_weights": False, "is_causal": True},
    {"attn_mask": CAUSAL, "need_weights": False, "is_causal": True, "key_padding_mask": PADDED},
    {"attn_mask": torch.randn(6, 5, 5), "key_padding_mask": torch.randn(3, 5)},
    {"key_padding_mask": PADDED, "need_weights": False},
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{"batch_first": True}, {"bias": False}])
def test_self_attention(options: dict[str, Any], training: bool, call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Attends(**options).train(training)
    masks = pruned(model)
    mine = pack(model, masks)
    x = torch.randn(3, 5, 8) if options.get("batch_first") else torch.randn(5, 3, 8)
    (wanted, weights), (found, mine_weights) = model(x, x, x, **call), mine(x, x, x, **call)
    torch.testing.assert_close(found, wanted)
    assert (weights is None) is (mine_weights is None)
    if weights is not None:
        torch.testing.assert_close(mine_weights, weights)
    found.square().sum().backward()
    wanted.square().sum().backward()
    gradient = model.get_parameter("attention.in_proj_weight").grad
    assert gradient is not None
    torch.testing.assert_close(
        mine.get_parameter("attention.in_proj.values").grad, gradient[masks["attention.in_proj_weight"]]
    )


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_first": True}, (8, 8)),
        ({"kdim": 6, "vdim": 4}, (6, 4)),
        ({"add_bias_kv": True}, (8, 8)),
        ({"add_zero_attn": True}, (8, 8)),
    ],
)
def test_other_attention_gives_the_same_with_dense_weights(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Attends(**options)
    mine = pack(model, {name: mask for name, mask in pruned(model).items() if "bias" not in name})
    given = torch.randn(3, 5, 8), torch.randn(3, 5, sizes[0]), torch.randn(3, 5, sizes[1])
    for found, wanted in zip(mine(*given), model(*given), strict=True):
        torch.testing.assert_close(found, wanted)
    if sizes == (8, 8):
        for found, wanted in zip(mine(*given[:1] * 3), model(*given[:1] * 3), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padding", [None, PADDED])
def test_the_encoder_of_torch_runs_sparse_in_both_modes(norm_first: bool, padding: Tensor | None) -> None:
    """In evaluation mode torch would call fused kernels that read dense weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    mine, x = pack(model, pruned(model)), torch.randn(3, 5, 8)
    assert describe(mine) == {
        f"layers.{i}.{name}": "sparse"
        for i in range(2)
        for name in ("self_attn.out_proj", "self_attn.in_proj", "linear1", "linear2")
    }
    kept = slice(None) if padding is None else ~padding
    for training in (True, False):
        wanted = model.train(training)(x, src_key_padding_mask=padding)
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = mine.train(training)(x, src_key_padding_mask=padding)
        assert [event.count for event in profile.key_averages() if event.key == "equipoise::linear"] == [8]
        torch.testing.assert_close(found[kept], wanted.detach()[kept])


def test_a_topology_trains_it_as_in_masked_storage() -> None:
    """Names, masks and growth are those of the unpacked model."""
    torch.manual_seed(0)
    algorithm = RigL(sparsity=0.5, every=2)
    masked = Attends(batch_first=True)
    mine = pack(masked, algorithm)
    x, outcomes = torch.randn(3, 5, 8), []
    for model in (masked, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        topology = algorithm.attach(model, optimizer, total_steps=20)
        for _ in range(4):
            optimizer.zero_grad()
            model(x, x, x)[0].square().sum().backward()
            optimizer.step()
        assert topology.updates == 2
        outcomes.append(topology.masks)
    assert outcomes[0].keys() == outcomes[1].keys() == {"attention.in_proj_weight", "attention.out_proj.weight"}
    for name, mask in outcomes[0].items():
        assert torch.equal(mask, outcomes[1][name])
        torch.testing.assert_close(unpack(mine)[0][name], masked.get_parameter(name).detach())
    state, _ = unpack(copy.deepcopy(mine))
    assert state.keys() == masked.state_dict().keys()
    Attends(batch_first=True).load_state_dict(state)


def test_a_partly_packed_attention() -> None:
    model = Attends(batch_first=True)
    mine, x = pack(model, SET(sparsity=0.5, exclude="attention.in_proj_weight")), torch.randn(3, 5, 8)
    model.load_state_dict(unpack(mine)[0])
    torch.testing.assert_close(mine(x, x, x)[0], model(x, x, x)[0])
