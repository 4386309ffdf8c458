"""The weight average against numpy, and its place on the topology."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise.errors import UserError
from equipoise.sparse import pack, unpack
from equipoise.topology import GMP, SET, BSRNet, Static
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.ema import EMA, weights_of


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def move(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


@settings(max_examples=20, deadline=None)
@given(decay=st.floats(0.01, 0.999), steps=st.integers(1, 40))
def test_the_average_equals_its_formula(decay: float, steps: int) -> None:
    net = model()
    average = EMA(net, decay)
    expected = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    for t in range(1, steps + 1):
        move(net, t)
        average.update()
        d = min(decay, (1 + t) / (10 + t))
        for name, p in net.named_parameters():
            expected[name] = d * expected[name] + (1 - d) * p.detach().numpy()
    for name, value in average.values.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-9, atol=1e-12)


def test_weights_that_stand_still_are_their_own_average() -> None:
    net = model()
    average = EMA(net, 0.995)
    for p in net.parameters():
        nn.init.constant_(p, 3.0)
    for _ in range(3000):
        average.update()
    for value in average.values.values():
        torch.testing.assert_close(value, torch.full_like(value, 3.0), rtol=1e-5, atol=0)


def test_the_average_is_a_copy() -> None:
    net = model()
    average = EMA(net, 0.9)
    before = {name: value.clone() for name, value in average.values.items()}
    move(net, 1)
    assert all(torch.equal(before[name], value) for name, value in average.values.items())
    assert not any(value.requires_grad for value in average.values.values())


def test_the_average_is_projected_on_the_topology_of_now() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    topology = SET(sparsity=0.6, every=2).attach(net, optimizer, total_steps=50)
    average = EMA(net, 0.9, topology)
    seen: dict[str, set[bytes]] = {name: set() for name in topology.masks}
    for step in range(12):
        torch.manual_seed(step)
        net(torch.randn(16, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        for name, mask in topology.masks.items():
            assert (average.values[name][~mask] == 0).all()
            seen[name].add(mask.numpy().tobytes())
    assert all(len(masks) > 3 for masks in seen.values())  # it did move
    for name, mask in topology.masks.items():
        assert (average.values[name][mask] != 0).any()
    assert average.values["0.bias"].abs().sum() > 0  # what is dense stays so


def averaged_weights(algorithm: Algorithm, packed: bool, early: bool = False) -> dict[str, np.ndarray]:
    """The average after twenty steps in which the topology moves, as dense weights by name."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    net = pack(net, algorithm) if packed else net
    average = EMA(net, 0.9) if early else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    topology = algorithm.attach(net, optimizer, total_steps=50)
    if average is None:
        average = EMA(net, 0.9)
    else:
        average.follow(topology)
    x, y = torch.randn(64, 30), torch.randint(5, (64,))
    for _ in range(20):
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    assert topology.updates > 4
    with average.applied():
        state = unpack(net)[0] if packed else net.state_dict()
        found = {name: value.detach().numpy().copy() for name, value in state.items()}
    for name, mask in topology.masks.items():
        assert (found[name][~mask.numpy()] == 0).all()
    return found


MOVING: dict[str, Algorithm] = {
    "set": SET(sparsity=0.9, every=3),
    "set at every step": SET(sparsity=0.3, every=1),
    "set without regrowth": SET(sparsity=0.9, every=3, regrow=False),
    "gmp": GMP(sparsity=0.9, every=3),
    "bsr-net": BSRNet(sparsity=0.01, distribution="erk", noise=0),
}


@pytest.mark.parametrize("name", MOVING)
def test_the_average_is_the_same_in_both_storages(name: str) -> None:
    """A weight that one update drops and regrows begins anew in either."""
    masked, packed = averaged_weights(MOVING[name], False), averaged_weights(MOVING[name], True)
    for key, value in masked.items():
        np.testing.assert_allclose(packed[key], value, rtol=1e-3, atol=1e-5)
        assert ((packed[key] != 0) == (value != 0)).all()


@pytest.mark.parametrize("packed", [False, True], ids=["masked", "packed"])
@pytest.mark.parametrize("name", MOVING)
def test_an_average_made_before_the_topology_is_the_same(name: str, packed: bool) -> None:
    early, late = (averaged_weights(MOVING[name], packed, early) for early in (True, False))
    for key, value in late.items():
        np.testing.assert_array_equal(early[key], value)


def test_an_average_that_does_not_follow_an_attached_topology_is_refused() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))
    average = EMA(net)
    topology = Static(sparsity=0.6).attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert topology.attached  # the reference keeps it from the garbage collector
    with pytest.raises(UserError, match=r"call ema\.follow"):
        average.update()


def test_an_average_is_sparse_as_soon_as_it_follows_a_topology() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))
    average = EMA(net)
    assert average.topology is None
    topology = Static(sparsity=0.6).attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    average.follow(topology)
    assert average.topology is topology
    for name, mask in topology.masks.items():
        assert (average.values[name][~mask] == 0).all()
        assert (average.values[name][mask] != 0).all()


def test_a_copy_of_the_average_follows_the_copied_model() -> None:
    algorithm = GMP(sparsity=0.9, every=2)
    net = pack(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4)), algorithm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    topology = algorithm.attach(net, optimizer, total_steps=50)
    average = EMA(net)
    before = {name: value.clone() for name, value in average.values.items()}
    twin, stepper, moved, copied = copy.deepcopy((net, optimizer, topology, average))
    for _ in range(4):
        twin(torch.ones(3, 10)).square().mean().backward()
        stepper.step()
        copied.update()
    assert copied.topology is moved
    assert {name: value.shape for name, value in copied.values.items()} == {
        name: p.shape for name, p in twin.named_parameters()
    }
    assert moved.active < topology.active
    assert all(torch.equal(before[name], value) for name, value in average.values.items())


def test_applying_the_average_leaves_no_trace() -> None:
    net = model()
    average = EMA(net, 0.5)
    move(net, 1)
    average.update()
    before = copy.deepcopy(net.state_dict())
    with average.applied():
        assert all(torch.equal(p, average.values[name]) for name, p in net.named_parameters())
        net.train()(torch.randn(8, 6, dtype=torch.float64))  # BatchNorm counts what it sees
    with pytest.raises(RuntimeError), average.applied():
        net(torch.randn(1, 6, dtype=torch.float64).expand(8, 5))  # of a wrong shape
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_the_average_goes_on_from_its_state() -> None:
    net = model()
    average = EMA(net, 0.9)
    for t in range(3):
        move(net, t)
        average.update()
    twin = copy.deepcopy(net)
    resumed = EMA(twin, 0.9)
    resumed.load_state_dict(copy.deepcopy(average.state_dict()))
    for net_, each in ((net, average), (twin, resumed)):
        move(net_, 9)
        each.update()
    assert resumed.steps == average.steps == 4
    for name, value in average.values.items():
        assert torch.equal(value, resumed.values[name])


def test_running_with_other_weights_leaves_the_own_untouched() -> None:
    net = model()
    own = dict(net.named_parameters())
    storages = {name: p.data_ptr() for name, p in own.items()}
    before = copy.deepcopy(net.state_dict())
    others = {name: torch.full_like(p, 0.5) for name, p in own.items()}
    x = torch.randn(5, 6, dtype=torch.float64)
    net.eval()
    with weights_of(net, others):
        found = net(x)
        assert all((p == 0.5).all() for p in net.parameters())
    expected = np.full((5, 8), 0.5) + 0.5 * x.numpy().sum(1, keepdims=True)  # Linear, all weights a half
    expected = 0.5 * expected / np.sqrt(1 + 1e-5) + 0.5  # BatchNorm with mean 0, variance 1
    np.testing.assert_allclose(found.detach().numpy(), 0.5 + 0.5 * expected.sum(1, keepdims=True).repeat(3, 1))
    for name, p in net.named_parameters():
        assert p is own[name]
        assert p.data_ptr() == storages[name]
        assert torch.equal(p, before[name])


def test_the_own_weights_come_back_after_an_error() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError), weights_of(net, {name: p.detach() + 1 for name, p in net.named_parameters()}):
        raise RuntimeError
    with (
        pytest.raises(UserError, match=r'^"0\.bias" was added'),
        weights_of(net, {"0.weight": torch.zeros(8, 6, dtype=torch.float64)}),
    ):
        pass
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 2.0])
def test_a_decay_that_cannot_be_is_refused(decay: float) -> None:
    with pytest.raises(UserError, match="ema="):
        EMA(model(), decay)
