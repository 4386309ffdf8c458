"""How many weights are active, how many ever were, and how many bytes that takes to know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.storage.masked import MaskedWeight
from equipoise.topology import ALGORITHMS, SET, RigL, Static, Topology
from equipoise.topology.packing import pack
from topology_helpers import DYNAMIC, SPARSE, assert_sparse, attach, make, perceptron, train


def held_bytes(topology: Topology) -> int:
    holders = [topology, *topology.layers]
    for layer in topology.layers:
        assert isinstance(layer, MaskedWeight)
        holders += [layer.masked, layer.growth_recorder]
    tensors = [value for holder in holders for value in vars(holder).values() if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors if not isinstance(t, nn.Parameter))


@pytest.mark.parametrize("algorithm", SPARSE)
def test_masks_take_one_byte_per_weight(algorithm: str) -> None:
    """And nothing else is kept between steps, but for SNFS's momentum and BSR-Net's signs."""
    model, optimizer, topology = make(algorithm)
    for step in range(7):
        train(model, optimizer, range(step, step + 1))
        assert held_bytes(topology) == topology.size * {"snfs": 5, "bsr-net": 2}.get(algorithm, 1)


def test_density_and_exploration() -> None:
    model, optimizer, topology = make("set", total=60, distribution="uniform")
    assert topology.density == topology.exploration == pytest.approx(0.3, abs=0.002)
    ever = topology.masks
    for step in range(30):
        train(model, optimizer, range(step, step + 1))
        ever = {name: ever[name] | mask for name, mask in topology.masks.items()}
        assert topology.exploration == sum(int(mask.sum()) for mask in ever.values()) / topology.size
    assert topology.exploration > 2 * topology.density
    dense = ALGORITHMS["dense"]().attach(model, optimizer)
    assert (dense.density, dense.exploration, dense.masks) == (1.0, 1.0, {})


@settings(max_examples=15, deadline=None)
@given(
    algorithm=st.sampled_from(sorted(DYNAMIC)),
    sparsity=st.floats(0, 0.98),
    share=st.floats(0, 1),
    regrow=st.booleans(),
    distribution=st.sampled_from(["uniform", "er", "erk"]),
)
def test_counts_never_drift(algorithm: str, sparsity: float, share: float, regrow: bool, distribution: str) -> None:
    check_drift(algorithm, 60, sparsity=sparsity, drop_fraction=share, regrow=regrow, distribution=distribution)


@pytest.mark.parametrize("algorithm", ["set", "rigl"])
def test_counts_do_not_drift_over_a_thousand_updates(algorithm: str) -> None:
    check_drift(algorithm, 1000, sparsity=0.73, drop_fraction=0.37, drop_decay="constant", until=1.0)


def check_drift(algorithm: str, steps: int, **options: Any) -> None:
    if algorithm == "granet":
        options["initial_sparsity"] = options["sparsity"] / 2
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    topology = attach(algorithm, model, optimizer, steps, every=1, **options)
    budget = round((1 - options["sparsity"]) * 56)
    inputs = torch.randn(4, 5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    assert_sparse(topology)
    assert topology.active == (budget if topology.layers else 0)
    assert [layer.active for layer in topology.layers] == [layer.final for layer in topology.layers]


def test_a_grown_weight_starts_at_zero_even_if_somebody_wrote_there() -> None:
    """sparsimony's SET computes the zeroed weights and throws them away: regrown ones keep stale values."""
    model = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    topology = SET(sparsity=0.5, every=1, drop_fraction=0.9).attach(model, optimizer, total_steps=50)
    for _ in range(20):
        before = topology.masks["weight"]
        with torch.no_grad():
            model.weight.fill_(7.0)
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        grown = topology.masks["weight"] & ~before
        assert grown.any()
        assert torch.count_nonzero(model.weight[grown]) == 0


def test_static_needs_no_length_of_training() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = Static(sparsity=0.9).attach(model, optimizer)
    assert not topology.update_is_next
    assert topology.active == round(0.1 * topology.size)


# A minimum of active weights for every unit


@pytest.mark.parametrize("algorithm", ["set", "rigl", "snfs", "mest", "gmp", "granet"])
def test_every_unit_keeps_its_minimum(algorithm: str) -> None:
    """RigL empties units: without the minimum some have no input left at the end."""
    options: dict[str, Any] = {"sparsity": 0.8, "distribution": "er", "every": 1, "until": 1.0}
    if algorithm != "gmp":
        options |= {"drop_fraction": 0.9, "drop_decay": "constant"}

    def fewest(least: int) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20 * 4, 30), nn.Linear(30, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        topology = attach(algorithm, model, optimizer, 60, min_fan_in=least, **options)
        fewest = [10**6] * 3
        for _ in range(60):
            counts = [mask.flatten(1).sum(1) for mask in topology.masks.values()]
            fewest = [min(low, int(count.min())) for low, count in zip(fewest, counts, strict=True)]
            optimizer.zero_grad()
            model(torch.randn(8, 3, 4, 4)).square().mean().backward()
            optimizer.step()
        assert [layer.active for layer in topology.layers] == [layer.final for layer in topology.layers]
        assert topology.active == round(0.2 * topology.size)
        return fewest

    without, with_minimum = fewest(0), fewest(3)
    assert min(without) == 0 or algorithm == "gmp"
    assert min(with_minimum) == 3


def test_the_minimum_of_a_small_layer_is_what_it_has() -> None:
    model = nn.Linear(50, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = SET(sparsity=0.95, min_fan_in=7, every=1, drop_fraction=0.9).attach(model, optimizer, total_steps=50)
    for _ in range(20):
        assert topology.active == 100
        assert int(topology.masks["weight"].sum(1).min()) == 2  # 100 weights for 40 units
        model(torch.randn(4, 50)).square().mean().backward()
        optimizer.step()


def test_the_initial_mask_is_random_apart_from_the_minimum() -> None:
    masks = []
    for seed in range(300):
        model = nn.Linear(4, 3, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        masks.append(Static(sparsity=0.5, min_fan_in=1, seed=seed).attach(model, optimizer).masks["weight"])
    frequency = torch.stack(masks).float().mean(0)
    assert frequency == pytest.approx(0.5, abs=0.12)  # 4 standard errors
    assert min(int(mask.sum(1).min()) for mask in masks) == 1
    assert max(int(mask.sum(1).max()) for mask in masks) == 4


def test_the_minimum_holds_in_packed_storage_too() -> None:
    algorithm = RigL(sparsity=0.9, min_fan_in=2, every=1, until=1.0, drop_fraction=0.8, drop_decay="constant")
    torch.manual_seed(0)
    masked = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    packed = pack(masked, algorithm)
    found = []
    for model in (masked, packed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        topology = algorithm.attach(model, optimizer, total_steps=10)
        torch.manual_seed(1)
        for _ in range(8):
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert min(int(mask.sum(1).min()) for mask in topology.masks.values()) >= 2
        found.append(topology)
    assert {topology.storage for topology in found} == {"masked", "packed"}
    assert all(torch.equal(found[0].masks[name], mask) for name, mask in found[1].masks.items())
