"""SRigL against its published pseudo-code, and what holds in whole trainings."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import equipoise as eq
from equipoise.errors import UserError

Array = NDArray[np.float64]


def published(weight: Array, gradient: Array, mask: NDArray[np.bool_], k: int, zeta: float, gamma: float) -> Any:
    """One update of a layer, steps 1 to 7 of section 3 in the paper; returns the weights that are kept, and the mask.

    The weights of units are rows. Step 4 compares with max(1, ⌊γ·k⌋), as the published code does.
    """
    outputs, inputs = mask.shape
    active = sorted(((abs(weight[i]), i) for i in zip(*np.nonzero(mask), strict=True)), reverse=True)
    exchanged = round(zeta * len(active))  # K
    gradients = sorted(((abs(gradient[i]), i) for i in np.ndindex(mask.shape)), reverse=True)
    salient = {i for _, i in active[: len(active) - exchanged]} | {i for _, i in gradients[:exchanged]}
    counts = [sum(i[0] == unit for i in salient) for unit in range(outputs)]
    order = sorted(range(outputs), key=lambda unit: -counts[unit])
    least = max(1, math.floor(gamma * k))
    units = {unit for unit in order if counts[unit] >= least} | set(order[: math.ceil(outputs * k / inputs)])
    fan_in = min(outputs * k // len(units), inputs)  # k'
    strongest = [i for _, i in active if i[0] in units][: len(active) - exchanged]
    kept = np.zeros_like(mask)
    for unit in units:
        for i in [i for i in strongest if i[0] == unit][:fan_in]:
            kept[i] = True
    after = kept.copy()
    for unit in units:
        free = [i for _, i in gradients if i[0] == unit and not kept[i]]
        for i in free[: fan_in - kept[unit].sum()]:
            after[i] = True
    return kept, after


@given(
    seed=st.integers(0, 2**16),
    outputs=st.integers(2, 9),
    inputs=st.integers(2, 12),
    part=st.floats(0.05, 0.95),
    zeta=st.floats(0.05, 1.0),
    gamma=st.floats(0.0, 1.0),
)
def test_updates_against_the_pseudo_code(
    seed: int, outputs: int, inputs: int, part: float, zeta: float, gamma: float
) -> None:
    rng = np.random.default_rng(seed)
    k = max(1, round(part * inputs))
    model = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    scales = rng.random((outputs, 1)) ** 4  # some units are weak
    weight, gradient = rng.normal(size=(outputs, inputs)) * scales, rng.normal(size=(outputs, inputs)) * scales
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    algorithm = eq.SRigL(
        distribution=[k / inputs], dense_last=False, every=1, until=1.0, drop_fraction=zeta, drop_end=zeta,
        min_salience=gamma, seed=seed,
    )  # fmt: skip
    topology = algorithm.attach(model, optimizer, total_steps=4)
    mask = topology.masks["weight"].numpy()
    assert mask.sum() == outputs * k
    weight = weight * mask
    for _ in range(3):  # the second update begins with removed units, and units return
        kept, after = published(weight, gradient, mask, k, zeta, gamma)
        (model.weight * torch.from_numpy(gradient)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if k == inputs and mask.all():  # nothing to exchange
            kept, after = mask, mask
        mask = topology.masks["weight"].numpy()
        np.testing.assert_array_equal(mask, after)
        weight = weight * kept
        np.testing.assert_array_equal(model.weight.detach().numpy(), weight)
        assert topology.active == mask.sum()
        weight = rng.normal(size=weight.shape) * mask
        gradient = rng.normal(size=weight.shape) * rng.random((outputs, 1)) ** 2
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(weight))


def train(algorithm: Any, steps: int, packed: bool = False) -> tuple[nn.Module, eq.Topology, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 4))
    model = eq.sparse.pack(model, algorithm) if packed else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    topology = algorithm.attach(model, optimizer, total_steps=steps)
    x, masks = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), []
    for _ in range(steps):
        nn.functional.cross_entropy(model(x), (x[:, :4]).argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        masks.append(topology.masks)
    return model, topology, masks


@pytest.mark.parametrize("packed", [False, True])
def test_units_are_removed_and_their_weights_go_to_the_others(packed: bool) -> None:
    algorithm = eq.SRigL(sparsity=0.9, every=4, min_salience=0.9, drop_fraction=0.5)
    _, topology, masks = train(algorithm, 60, packed)
    assert list(topology.masks) == ["0.weight", "2.weight"]
    removed = 0
    for step in masks:
        for layer in topology.layers:
            counts = step[layer.name].sum(1)
            left = int((counts > 0).sum())
            assert set(counts.tolist()) <= {0, layer.final // left}
            assert layer.final - left < int(counts.sum()) <= layer.final
            removed += len(counts) - left
    assert removed > 0


def test_both_storages_remove_the_same_units() -> None:
    algorithm = eq.SRigL(sparsity=0.9, every=4, min_salience=0.9, drop_fraction=0.5)
    (_, masked, _), (_, packed, _) = train(algorithm, 40), train(algorithm, 40, packed=True)
    for name, mask in masked.masks.items():
        assert torch.equal(mask, packed.masks[name])


def test_a_resumed_run_is_the_same_to_the_bit() -> None:
    algorithm = eq.SRigL(sparsity=0.9, every=4, min_salience=0.9)
    x = torch.randn(64, 16)

    def make() -> tuple[nn.Module, torch.optim.Optimizer, eq.Topology]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        return model, optimizer, algorithm.attach(model, optimizer, total_steps=40)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(x).square().sum().sqrt().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, half, resumed = make(), make(), make()
    run(*whole[:2], 26)
    run(*half[:2], 13)
    for target, source in zip(resumed, half, strict=True):
        target.load_state_dict(source.state_dict())
    run(*resumed[:2], 13)
    assert all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), resumed[0].parameters(), strict=True))
    assert any(not mask.any(1).all() for mask in whole[2].masks.values())  # some units are removed


def test_the_last_weight_stays_dense_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology = eq.SRigL.fast(sparsity=0.5).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), 100)
    assert list(topology.masks) == ["0.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "16x1"}, 'pattern="16x1": SRigL has the pattern "fan_in"; use rigl for other patterns'),
        ({"min_salience": 1.5}, "min_salience=1.5: a fraction of the fan-in must be between 0 and 1"),
        ({"min_fan_in": 2}, "min_fan_in=2: not with pattern"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        eq.SRigL(**options)
