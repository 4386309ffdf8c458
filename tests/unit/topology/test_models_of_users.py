"""What may happen to a model that a topology is attached to: dtypes, devices, layouts, frozen and tied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.topology import RigL, Topology
from topology_helpers import DYNAMIC, SPARSE, assert_sparse, attach, batch, convnet, make, perceptron, train


@pytest.mark.parametrize("algorithm", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_model_may_change_its_dtype_after_attaching(algorithm: str, dtype: torch.dtype) -> None:
    model, optimizer, topology = make(algorithm)
    train(model, optimizer, range(4))
    masks = topology.masks
    model.to(dtype)
    optimizer.load_state_dict(optimizer.state_dict())  # torch's way of taking the state along
    assert all(torch.equal(masks[name], mask) for name, mask in topology.masks.items())
    for step in range(4, 10):
        train(model, optimizer, range(step, step + 1))
        assert_sparse(topology)
    assert (topology.updates > 1) == (algorithm != "static")


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", SPARSE)
def test_the_model_may_move_to_the_gpu_after_attaching(algorithm: str) -> None:
    model, optimizer, topology = make(algorithm)
    train(model, optimizer, range(4))
    masks = topology.masks
    model.cuda()
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(mask.is_cuda and torch.equal(masks[name], mask.cpu()) for name, mask in topology.masks.items())
    for step in range(4, 10):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        F.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()
        optimizer.step()
        assert_sparse(topology)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("algorithm", ["set", "rigl"])
def test_channels_last_makes_no_difference(when: str, algorithm: str) -> None:
    def run(memory_format: torch.memory_format, early: bool) -> tuple[nn.Module, Topology]:
        model: Any = convnet().double()
        if early:
            model = model.to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        topology = attach(algorithm, model, optimizer, 20, sparsity=0.6, every=2)
        model = model.to(memory_format=memory_format)
        generator = torch.Generator().manual_seed(0)
        for _ in range(7):
            optimizer.zero_grad()
            inputs = torch.randn(4, 3, 6, 6, generator=generator).double().to(memory_format=memory_format)
            model(inputs).square().mean().backward()
            optimizer.step()
            assert_sparse(topology)
        return model, topology

    plain, plain_topology = run(torch.contiguous_format, False)
    other, other_topology = run(torch.channels_last, when == "before")
    assert other.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    for name, mask in plain_topology.masks.items():
        assert torch.equal(mask, other_topology.masks[name])
    for left, right in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_frozen_weights_stay_as_they_are() -> None:
    model = perceptron()
    model.first.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen = model.first.weight.clone()
    topology = RigL(sparsity=0.7, every=2).attach(model, optimizer, total_steps=20)
    train(model, optimizer, range(5))
    assert list(topology.masks) == ["last.weight"]
    assert torch.equal(model.first.weight, frozen)


@pytest.mark.parametrize("algorithm", DYNAMIC)
def test_a_weight_frozen_later_is_not_rewired(algorithm: str) -> None:
    model, optimizer, topology = make(algorithm)
    train(model, optimizer, range(4))
    model.first.weight.requires_grad_(False)
    optimizer.zero_grad()
    frozen, mask = model.first.weight.clone(), topology.masks["first.weight"]
    train(model, optimizer, range(4, 10))
    assert torch.equal(model.first.weight, frozen)
    assert torch.equal(topology.masks["first.weight"], mask)
    model.first.weight.requires_grad_(True)
    train(model, optimizer, range(10, 13))
    assert not torch.equal(model.first.weight, frozen)
    assert_sparse(topology)


class Transformer(nn.Module):
    """Attention, norms, an embedding and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm((5, 8))
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.mix(self.norm(self.attention(x, x, x)[0])))


@pytest.mark.parametrize("algorithm", SPARSE)
def test_attention_is_sparse_and_norms_and_tied_embeddings_are_not(algorithm: str) -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    topology = attach(algorithm, model, optimizer, 30, sparsity=0.6, every=2)
    assert set(topology.masks) == {"attention.in_proj_weight", "attention.out_proj.weight", "mix.weight"}
    for _ in range(6):
        tokens = torch.randint(11, (4, 5))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        assert_sparse(topology)
    for dense in (model.embedding.weight, model.norm.weight):
        assert torch.count_nonzero(dense) == dense.numel()
