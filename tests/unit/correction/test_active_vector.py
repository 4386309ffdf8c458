"""Parameters to one flat vector of active weights and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.correction import SVRG, Gradients
from equipoise.correction.active_vector import ActiveVector
from equipoise.errors import UserError
from equipoise.topology import GMP, SET, Static, Topology


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)
    return nn.Sequential(*layers).to(dtype)


def sparse(model: nn.Module, kind: type[Any] = SET, **options: Any) -> tuple[Topology, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind is not Static:
        options = {"every": 1, "drop_fraction": 0.5} | options
    return kind(**{"sparsity": 0.6} | options).attach(model, optimizer, 10), optimizer


def move(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step, and with it a topology update."""
    model(torch.randn(8, 2, 4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(model: nn.Module, masks: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
    """Boolean indexing in the model's order."""
    names = [name for name, _ in model.named_parameters()]
    return torch.cat([t[masks[n]] if n in masks else t.flatten() for n, t in zip(names, tensors, strict=True)])


def test_only_active_weights_have_an_entry() -> None:
    model = model_of()
    topology, _ = sparse(model)
    vector = ActiveVector(list(model.parameters()), topology)
    norms_and_biases = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert vector.size == topology.active + norms_and_biases == sum(vector.sizes)
    tensors = [torch.randn_like(p) for p in model.parameters()]
    assert torch.equal(vector.pack(tensors), by_hand(model, topology.masks, tensors))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 100), channels_last=st.booleans())
def test_adding_changes_active_weights_only(seed: int, channels_last: bool) -> None:
    model = model_of()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    topology, _ = sparse(model, Static, seed=seed)
    vector = ActiveVector(list(model.parameters()), topology)
    start = {}
    for name, p in model.named_parameters():
        p.grad = torch.randn_like(p)
        start[name] = p.grad.clone()
        assert not channels_last or p.dim() < 4 or not p.grad.is_contiguous()
    added = [torch.randn_like(p) for p in model.parameters()]
    Gradients().add(vector, vector.pack(added))
    for (name, p), extra in zip(model.named_parameters(), added, strict=True):
        mask = topology.masks.get(name, torch.ones_like(p, dtype=torch.bool))
        torch.testing.assert_close(p.grad, start[name] + torch.where(mask, extra, 0.0), rtol=0, atol=0)


def test_unpacking_undoes_packing() -> None:
    model = model_of()
    topology, _ = sparse(model)
    vector = ActiveVector(list(model.parameters()), topology)
    tensors = [torch.randn_like(p) for p in model.parameters()]
    for (name, p), tensor, back in zip(
        model.named_parameters(), tensors, vector.unpack(vector.pack(tensors)), strict=True
    ):
        mask = topology.masks.get(name, torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(back, torch.where(mask, tensor, 0.0))


def test_live_is_zero_for_dropped_weights() -> None:
    model = model_of()
    topology, optimizer = sparse(model)
    vector = ActiveVector(list(model.parameters()), topology)
    assert vector.live() is None
    before = topology.masks
    for _ in range(2):
        move(model, optimizer)
        now = [topology.masks.get(name, torch.ones_like(p)).float() for name, p in model.named_parameters()]
        live = vector.live()
        assert live is not None
        assert torch.equal(live, by_hand(model, before, now))
        assert 0 < live.mean() < 1


def test_dense_layers_that_are_pruned_later() -> None:
    """Under gradual pruning a layer starts with all weights and loses some of them."""
    model = model_of()
    topology, optimizer = sparse(model, GMP, drop_fraction=0.0, until=1.0)
    vector = ActiveVector(list(model.parameters()), topology)
    assert vector.size == sum(p.numel() for p in model.parameters())
    move(model, optimizer)
    live = vector.live()
    assert live is not None
    assert int(live.sum()) == topology.active + sum(p.numel() for p in model.parameters() if p.dim() == 1)


def test_translation_follows_the_weights() -> None:
    model = model_of()
    topology, optimizer = sparse(model)
    older, before = ActiveVector(list(model.parameters()), topology), topology.masks
    tensors = [torch.randn_like(p) for p in model.parameters()]
    values = older.pack(tensors)
    move(model, optimizer)
    newer = older.renewed()
    names = [name for name, _ in model.named_parameters()]
    kept = [torch.where(before[n], t, 0.0) if n in before else t for n, t in zip(names, tensors, strict=True)]
    assert torch.equal(newer.translate(older, values), by_hand(model, topology.masks, kept))
    both = [(before[n] if n in before else torch.ones_like(t)).float() for n, t in zip(names, tensors, strict=True)]
    assert torch.equal(newer.known_to(older), by_hand(model, topology.masks, both))
    assert newer.translate(older, values.bfloat16()).dtype == torch.bfloat16


def test_values_per_parameter_are_repeated() -> None:
    model = model_of()
    topology, _ = sparse(model)
    vector = ActiveVector(list(model.parameters()), topology)
    values = torch.arange(len(vector.sizes)).float()
    assert torch.equal(vector.spread(values), values.repeat_interleave(torch.tensor(vector.sizes)))


def test_a_state_is_loaded_after_the_masks_have_changed() -> None:
    model = model_of()
    topology, optimizer = sparse(model)
    vector = ActiveVector(list(model.parameters()), topology)
    move(model, optimizer)
    state = vector.state_dict()
    loaded = ActiveVector(list(model.parameters()), topology)
    assert loaded.live() is None
    loaded.load_state_dict(state)
    tensors = [torch.randn_like(p) for p in model.parameters()]
    assert torch.equal(loaded.pack(tensors), vector.pack(tensors))
    live, expected = loaded.live(), vector.live()
    assert live is not None
    assert expected is not None
    assert torch.equal(live, expected)
    with pytest.raises(UserError, match=r"the state has 6 trainable parameters and the model has 5"):
        ActiveVector(list(model.parameters())[:-1], topology).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"used": ["0"]}, "parameters other than 0 to 5"),
        ({"used": [6]}, "parameters other than 0 to 5"),
        ({"made_at": -1}, "made_at=-1"),
        ({"first": torch.tensor([3, 2])}, "not ascending numbers from 0 to"),
        ({"first": torch.tensor([-1, 2])}, "not ascending numbers from 0 to"),
        ({"first": torch.tensor([0, 10**6])}, "not ascending numbers from 0 to"),
        ({"first": torch.tensor([0.0, 1.0])}, "not ascending numbers from 0 to"),
    ],
)
def test_a_damaged_state_is_refused(changes: dict[str, Any], message: str) -> None:
    model = model_of()
    vector = ActiveVector(list(model.parameters()), sparse(model)[0])
    state = vector.state_dict()
    state["indices"] = [changes.pop("first", state["indices"][0]), *state["indices"][1:]]
    with pytest.raises(UserError, match=message):
        vector.load_state_dict(state | changes)


def test_mixed_precision_parameters_are_held_in_the_wider_type() -> None:
    model = model_of()
    model[3].to(torch.bfloat16)
    vector = ActiveVector(list(model.parameters()))
    assert vector.dtype == torch.float32
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    Gradients().add(vector, Gradients().read(vector))
    for p in model.parameters():
        torch.testing.assert_close(p.grad, torch.full_like(p, 2), rtol=0, atol=0)


class Alternating(nn.Module):
    """A layer that every second batch skips, as with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, inputs: Tensor, deep: bool) -> Tensor:
        hidden = self.always(inputs)
        return self.sometimes(torch.tanh(hidden)) if deep else hidden


@pytest.mark.parametrize("mode", ["recompute", "replay"])
def test_a_parameter_that_is_not_in_every_batch_stays_unbiased(mode: Any) -> None:
    torch.manual_seed(0)
    model = Alternating().double()
    batches = [(torch.randn(4, 3).double(), i % 2 == 0) for i in range(6)]

    def loss_fn(model: nn.Module, inputs: Tensor, deep: bool) -> Tensor:
        return model(inputs, deep).square().mean()

    def gradients() -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    correction = SVRG(mode=mode).attach(model)
    correction.refresh(batches, loss_fn)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    mean = [torch.zeros_like(p) for p in model.parameters()]
    full = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches:
        for sums, run in ((mean, correction.backward), (full, lambda f, *b: f(model, *b).backward())):
            model.zero_grad()
            run(loss_fn, *batch)
            for total, found in zip(sums, gradients(), strict=True):
                if found is not None:
                    total += found / len(batches)
    for found, expected in zip(mean, full, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    model.zero_grad()
    correction.refresh(batches, loss_fn)
    correction.backward(loss_fn, *batches[0])
    assert model.never.weight.grad is None, "an optimizer would decay an unused weight"
