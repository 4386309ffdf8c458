"""The snapshot, the full pass and the old pass leave no trace in the live model."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from correction_helpers import Noisy, assert_same, attached, everything, loader, seed_all, streams
from correction_oracle import cross_entropy, make_batches, perceptron
from equipoise.correction import MVR, SAGA, SVRG, Agent, AgentMVR, Estimator, Gradient, Loss
from equipoise.correction.snapshot import Snapshot, without_trace
from equipoise.errors import UserError

ESTIMATORS: dict[str, Estimator] = {
    "recompute": Agent(),
    "replay": Agent(mode="replay", coefficient=Loss(batch_fraction=1.0)),
    "running": Agent(mode="running"),
    "batch_fraction": SVRG(batch_fraction=0.4),
    "pays": Agent(when="pays", probe=3),
    "pays, replay": SVRG(when="pays", probe=3, coefficient="gradient", mode="replay"),
    "gradient per layer": SVRG(coefficient=Gradient(per_layer=True)),
    "mvr": MVR(),
    "agent-mvr": AgentMVR(),
    "saga": SAGA(),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_refresh_leaves_no_trace(name: str) -> None:
    model, optimizer, _, correction = attached(ESTIMATORS[name])
    batches = loader()
    for _ in range(3):
        before = everything(model, optimizer)
        correction.refresh(batches, cross_entropy)
        assert_same(before, everything(model, optimizer))
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            correction.backward(cross_entropy, x, y, index=i)
            optimizer.step()


def test_refresh_leaves_no_trace_when_it_fails() -> None:
    model, optimizer, _, correction = attached(Agent())

    def breaks(model: nn.Module, x: Tensor, y: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        if len(seen) > 2:
            raise RuntimeError("out of memory")
        return cross_entropy(model, x, y)

    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="out of memory"):
        correction.refresh(loader(), breaks)
    assert_same(before, everything(model, optimizer))
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    torch.manual_seed(3)
    correction.backward(cross_entropy, x, y)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(3)
    cross_entropy(model, x, y).backward()
    assert_same(found, [p.grad for p in model.parameters()])  # half a full pass corrects nothing


@pytest.mark.parametrize("name", ["recompute", "running", "mvr"])
def test_the_old_pass_leaves_no_trace(name: str) -> None:
    """Running statistics and random number generators change exactly as in one plain pass."""
    model, optimizer, _, correction = attached(ESTIMATORS[name])
    correction.refresh(loader(), cross_entropy)
    for x, y in loader():
        twin, state = copy.deepcopy(model), torch.get_rng_state()
        cross_entropy(twin, x, y)
        expected = [dict(twin.named_buffers()), streams()]
        torch.set_rng_state(state)
        correction.backward(cross_entropy, x, y)
        assert_same(expected, [dict(model.named_buffers()), streams()])
        optimizer.step()
        optimizer.zero_grad()


def test_replay_with_a_shuffling_loader_sees_the_coming_batches() -> None:
    """The generators are restored, so the loader shuffles and augments the epoch as it did for the refresh."""
    *_, correction = attached(SVRG(mode="replay"))
    seen: list[Tensor] = []

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(x.clone())
        return cross_entropy(model, x, y)

    batches = loader()
    for _ in range(2):
        seen.clear()
        correction.refresh(batches, loss_fn)
        for x, y in batches:
            correction.backward(loss_fn, x, y)
        assert len(seen) == 10
        assert all(torch.equal(a, b) for a, b in zip(seen[:5], seen[5:], strict=True))


def test_a_probe_does_not_consume_a_one_shot_iterator() -> None:
    model = perceptron()
    correction = SVRG(when="pays", probe=3, coefficient="gradient").attach(model)
    seen: list[int] = []

    def loss_fn(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        seen.append(number)
        return cross_entropy(model, x, y)

    def batches() -> Iterator[tuple[Any, ...]]:
        yield from ((i, *batch) for i, batch in enumerate(make_batches(6)))

    correction.refresh(batches(), loss_fn)
    assert seen == [], "there is no snapshot to compare with yet"
    with torch.no_grad():
        model.last.bias.add_(1e-3)
    correction.refresh(batches(), loss_fn)
    assert seen == [0, 0, 1, 1, 2, 2, 0, 1, 2, 3, 4, 5]
    assert correction.enabled


# The snapshot itself


def test_the_model_computes_at_the_snapshot_and_gets_its_tensors_back() -> None:
    model = Noisy()
    snapshot = Snapshot(model)
    assert not snapshot
    snapshot.take()
    old = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.norm.buffers()):
            tensor.add_(1)
    own = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    x = torch.randn(5, 6)
    with snapshot.at():
        assert torch.equal(model.eval()(x), old.eval()(x))
    assert not torch.equal(model(x), old(x))
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == own[name][0]
        assert torch.equal(tensor, own[name][1])


def test_tensors_come_back_after_an_error() -> None:
    model = Noisy()
    snapshot = Snapshot(model)
    snapshot.take()
    with torch.no_grad():
        model.last.weight.add_(1)
    weight = model.last.weight.detach().clone()
    with pytest.raises(RuntimeError), snapshot.at():
        raise RuntimeError
    assert torch.equal(model.last.weight, weight)


def test_a_model_that_was_moved_after_attaching() -> None:
    """`to` keeps parameters but replaces buffers; the live running statistics must still be protected."""
    model = Noisy()
    correction = SVRG().attach(model)
    model.double()
    batches = make_batches(4, size=8)
    correction.refresh(batches, cross_entropy)
    before = [b.clone() for b in model.buffers()]
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    cross_entropy(twin, *batches[0])
    torch.set_rng_state(state)
    correction.backward(cross_entropy, *batches[0])
    assert_same(list(twin.buffers()), list(model.buffers()))
    assert not torch.equal(before[0], next(iter(model.buffers())))


def test_a_compiled_model_has_the_snapshot_of_its_module() -> None:
    model = perceptron()
    compiled = torch.compile(model, backend="eager")
    plain, wrapped = Snapshot(model), Snapshot(compiled)  # type: ignore[arg-type]
    plain.take()
    wrapped.take()
    assert plain.tensors.keys() == wrapped.tensors.keys()


def test_the_snapshot_of_another_model_is_refused() -> None:
    snapshot = Snapshot(perceptron())
    snapshot.take()
    with pytest.raises(UserError, match="another model"):
        Snapshot(Noisy()).load(snapshot.tensors)
    with pytest.raises(UserError, match="shape"):
        Snapshot(perceptron()).load(snapshot.tensors | {"last.bias": torch.zeros(4)})


def test_without_trace_restores_also_after_an_error() -> None:
    model = Noisy()
    seed_all(2)
    before = [list(map(torch.clone, model.buffers())), streams()]
    with pytest.raises(RuntimeError), without_trace(model, torch.device("cpu")):  # noqa: PT012
        model(torch.randn(4, 6))
        random.random()
        np.random.rand()  # noqa: NPY002
        raise RuntimeError
    assert_same(before, [list(model.buffers()), streams()])


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_does_not_mix_up_the_two_sets_of_weights(outside: bool) -> None:
    """Autocast caches the bf16 copy of a weight until its context ends; here both passes are in one context."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = make_batches(4, size=8, dtype=torch.float32)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    def gradients(of: nn.Module, batch: Any) -> list[Tensor]:
        return list(torch.autograd.grad(loss_fn(of, *batch), list(of.parameters())))

    correction = SVRG().attach(model)
    correction.refresh(batches, loss_fn)
    old = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    full = [torch.stack(parts).mean(0) for parts in zip(*(gradients(old, b) for b in batches), strict=True)]
    expected = [
        n - o + m for n, o, m in zip(gradients(model, batches[1]), gradients(old, batches[1]), full, strict=True)
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        correction.backward(loss_fn, *batches[1])
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-4, atol=1e-6)
