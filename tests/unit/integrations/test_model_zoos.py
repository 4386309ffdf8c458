"""Models of timm, torchvision and transformers: which weights become sparse when a topology is attached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import equipoise as eq
from equipoise.analysis.flops import count, total
from equipoise.errors import UserError
from equipoise.storage.packed_modules import named_layers
from equipoise.topology.selection import select

pytestmark = pytest.mark.xdist_group("frameworks")


def dense(model: nn.Module, chosen: Any) -> set[str]:
    """The matrices and tensors of a model that are not chosen."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() > 1} - set(chosen)


def trained(model: nn.Module, loss: Callable[[], Tensor]) -> eq.Topology:
    """Attach without options, train a few steps, and check the zeros."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    topology = eq.RigL(sparsity=0.8, every=2).attach(model, optimizer, total_steps=20)
    for _ in range(4):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert topology.updates == 2
    for name, mask in topology.masks.items():
        assert not torch.count_nonzero(model.get_parameter(name)[~mask])
    return topology


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_resnet", set()),
        ("test_convnext", set()),
        ("test_efficientnet", set()),
        ("test_vit", {"cls_token", "pos_embed"}),
    ],
)
def test_timm(timm: Any, name: str, expected: set[str]) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4)
    images, labels = torch.randn(2, 3, *model.pretrained_cfg["input_size"][1:]), torch.tensor([0, 1])
    topology = trained(model, lambda: cross_entropy(model(images), labels))
    assert dense(model, topology.masks) == expected


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet", "test_vit", "test_mambaout"])
def test_timm_is_packed(timm: Any, name: str) -> None:
    """Subclasses of Linear and Conv2d, depthwise and grouped convolutions."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4)
    images = torch.randn(2, 3, *model.pretrained_cfg["input_size"][1:])
    mine = eq.sparse.pack(model, eq.SET(sparsity=0.6))
    state, masks = eq.sparse.unpack(mine)
    assert masks.keys() == select(model).keys()
    model.load_state_dict(state)
    outcomes = [net.eval()(images) for net in (model, mine)]
    for out in outcomes:
        out.square().sum().backward()
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-3, atol=1e-4)
    largest = max(
        float(weight.grad.abs().max()) for weight in map(model.get_parameter, masks) if weight.grad is not None
    )
    for (weight_name, mask), layer in zip(masks.items(), named_layers(mine).values(), strict=True):
        gradient = model.get_parameter(weight_name).grad
        assert gradient is not None
        torch.testing.assert_close(layer.values.grad, gradient[mask], rtol=1e-2, atol=1e-4 * largest)


def test_a_convolution_of_timm_with_its_own_padding_is_named(timm: Any) -> None:
    model = nn.Sequential(timm.layers.Conv2dSame(3, 4, 3, stride=2), nn.Conv2d(4, 4, 1))
    with pytest.warns(UserWarning, match=r'dense weights: "0" \(Conv2dSame overrides its forward\)$'):
        mine = eq.sparse.pack(model, eq.SET(sparsity=0.5))
    assert eq.sparse.report(mine).splitlines()[1].split("  ")[-1] == "dense: Conv2dSame overrides its forward"


def test_convolutions_of_timm_with_a_gain_are_packed(timm: Any) -> None:
    torch.manual_seed(0)
    model, images = timm.create_model("nf_resnet26", num_classes=4).eval(), torch.randn(1, 3, 64, 64)
    with pytest.warns(UserWarning, match=r'dense weights: "stem.conv" \(ScaledStdConv2d overrides its forward\)'):
        mine = eq.sparse.pack(model, eq.SET(sparsity=0.9))
    state, masks = eq.sparse.unpack(mine)
    assert masks.keys() == select(model).keys()
    assert not any("gain" in name for name in masks)
    model.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(mine(images), model(images))


class TorchvisionBlock(nn.Module):
    """The encoder block of torchvision's vision transformers, with its names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.self_attention(x, x, x, need_weights=False)[0])


def test_attention_of_torch() -> None:
    torch.manual_seed(0)
    model, x = TorchvisionBlock(), torch.randn(2, 5, 8)
    topology = trained(model, lambda: model(x).square().mean())
    assert dense(model, topology.masks) == set()
    assert topology.masks["self_attention.in_proj_weight"].shape == (24, 8)
    different = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True)
    assert list(select(different)) == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]


def test_bert(hf: Any) -> None:
    model, tokens = hf.bert(), torch.randint(20, (4, 6))
    topology = trained(model, lambda: model(input_ids=tokens, labels=torch.tensor([0, 1, 0, 1])).loss)
    assert {name.split(".")[-2] for name in dense(model, topology.masks)} == {
        "word_embeddings",
        "position_embeddings",
        "token_type_embeddings",
    }


def test_gpt2(hf: Any) -> None:
    model, tokens = hf.gpt2(), torch.randint(20, (4, 6))
    topology = trained(model, lambda: model(input_ids=tokens, labels=tokens).loss)
    assert dense(model, topology.masks) == {"transformer.wte.weight", "transformer.wpe.weight"}  # the head is tied
    # Erdős–Rényi: density proportional to (inputs + outputs) / (inputs * outputs), from the layers' own sizes
    layers = {name: model.get_submodule(name.removesuffix(".weight")) for name in topology.masks}
    sums = {name: layer.nx + layer.nf for name, layer in layers.items()}
    budget = 0.2 * sum(layer.nx * layer.nf for layer in layers.values())
    for name, mask in topology.masks.items():
        assert int(mask.sum()) == pytest.approx(budget * sums[name] / sum(sums.values()), abs=1)


def test_gpt2_is_packed_with_dense_kernels(hf: Any) -> None:
    torch.manual_seed(0)
    model, tokens = hf.gpt2().eval(), torch.randint(20, (4, 6))
    with pytest.warns(UserWarning, match=r"dense weights: .*no sparse kernel computes a Conv1D.* and \d+ more"):
        mine = eq.sparse.pack(model, eq.SET(sparsity=0.5))
    state, masks = eq.sparse.unpack(mine)
    assert masks.keys() == select(model).keys()
    model.load_state_dict(state)
    torch.testing.assert_close(mine(tokens).logits, model(tokens).logits)


def test_flops_of_gpt2(hf: Any) -> None:
    model, tokens = hf.gpt2(), torch.randint(20, (1, 6))
    sizes = [16 * 48, 16 * 16, 16 * 64, 64 * 16]  # attention, its output, and the two layers of the MLP
    assert total(count(model, tokens)).dense_forward == 2 * 6 * (2 * sum(sizes) + 16 * 20)


def test_gpt2_is_saved_and_loaded(hf: Any, tmp_path: Path) -> None:
    model = hf.gpt2().eval()
    eq.Static(sparsity=0.9).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    eq.save(model, tmp_path / "gpt2.safetensors")
    loaded, tokens = eq.load(tmp_path / "gpt2.safetensors", into=hf.gpt2().eval()), torch.randint(20, (2, 6))
    with torch.no_grad():
        np.testing.assert_allclose(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-6)


def test_a_model_without_known_layers_is_refused_by_what_it_has(hf: Any) -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.GRU(4, 4), nn.Linear(4, 2).requires_grad_(False))
    with pytest.raises(
        UserError,
        match=r"looked for Linear, Conv1d, .*, MultiheadAttention, Conv1D; "
        r"found 1 Embedding, 1 GRU, 1 Linear \(frozen, .*\); name weights of other layers with include",
    ) as error:
        eq.Static(sparsity=0.5).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "\n" not in str(error.value)
    assert list(select(model, include="1")) == ["1.weight_ih_l0", "1.weight_hh_l0"]
    with pytest.raises(UserError, match=r'looked for "1"; found 1 Embedding, 1 GRU'):
        select(model, include="1", exclude="1")
