"""Structured patterns: brute force over all masks of small weights, and properties of whole trainings."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import nn

import equipoise as eq
from equipoise.config import parse_yaml
from equipoise.errors import UserError
from equipoise.topology.pattern import NM, Block, Butterfly, FanIn, Pattern, Transposable, parse_pattern
from pattern_helpers import Groups, counts_in_groups, groups_of

CASES = [("2:4", (3, 8)), ("1:4", (2, 4, 2, 1)), ("4:8", (2, 16)), ("fan_in", (3, 2, 2, 2)), ("2x3", (4, 6)),
         ("4x1", (8, 3, 1, 2))]  # fmt: skip


@pytest.mark.parametrize(("text", "shape"), CASES)
def test_largest_is_the_best_of_all_masks(text: str, shape: tuple[int, ...]) -> None:
    """Every subset of a group is tried; groups are independent."""
    pattern = parse_pattern(text)
    assert pattern is not None
    score = np.random.default_rng(0).random(shape)
    count = pattern.whole(math.prod(shape) // 2, shape)
    chosen = pattern.largest(torch.from_numpy(score).reshape(-1), count, shape)
    mask = np.zeros(shape, bool)
    mask.reshape(-1)[chosen.numpy()] = True
    assert mask.sum() == len(chosen) == count
    (each,) = set(counts_in_groups(mask, text))
    best = 0.0
    for group in groups_of(text, shape):
        totals = [sum(score[index] for index in unit) for unit in group]
        best += max(sum(totals[k] for k in kept) for kept in itertools.combinations(range(len(group)), each))
    assert score[mask].sum() == pytest.approx(best)


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (3, 4), (1, 2), (2, 8), (4, 8)])
def test_transposable_masks_are_optimal_or_within_their_factor(n: int, m: int) -> None:
    pattern, shape = Transposable(n, m), (m, 2 * m)
    score = np.random.default_rng(n).random(shape) ** 3
    chosen = pattern.largest(torch.from_numpy(score).reshape(-1), math.prod(shape) * n // m, shape)
    mask = np.zeros(shape, bool)
    mask.reshape(-1)[chosen.numpy()] = True
    assert set(counts_in_groups(mask, str(pattern))) == {n}
    best = sum(_best_transposable(tile, n) for tile in np.split(score, 2, axis=1))
    if m <= 4:
        assert score[mask].sum() == pytest.approx(best)
    else:
        assert best * n / m <= score[mask].sum() <= best + 1e-9


def _best_transposable(score: NDArray[np.float64], n: int) -> float:
    """Largest sum of a mask with n in every row and column: a linear program with an integral solution."""
    m = len(score)
    rows, columns = np.kron(np.eye(m), np.ones(m)), np.kron(np.ones(m), np.eye(m))
    found = linprog(-score.reshape(-1), A_eq=np.vstack([rows, columns]), b_eq=np.full(2 * m, n), bounds=(0, 1))
    return float(-found.fun)


@pytest.mark.parametrize("m", [4, 6])
@pytest.mark.parametrize("regrow", [False, True])
def test_transposable_exchange_takes_the_best_matchings(m: int, regrow: bool) -> None:
    rng = np.random.default_rng(m)
    mask = np.zeros((m, m), bool)
    for shift in range(2):
        mask[np.arange(m), (np.arange(m) + shift) % m] = True
    drop, grow = rng.random((m, m)), rng.random((m, m))
    dropped, grown = Transposable(2, m).exchange(
        *(torch.from_numpy(score).reshape(-1) for score in (drop, grow)), torch.from_numpy(mask), 0, m, regrow
    )
    perfect = [[row * m + column for row, column in enumerate(p)] for p in itertools.permutations(range(m))]
    within = [p for p in perfect if mask.reshape(-1)[p].all()]
    lightest = min(within, key=lambda p: drop.reshape(-1)[p].sum())
    assert sorted(dropped.tolist()) == sorted(lightest)
    kept = mask.copy().reshape(-1)
    kept[lightest] = False
    outside = [p for p in perfect if not (kept if regrow else mask.reshape(-1))[p].any()]
    assert sorted(grown.tolist()) == sorted(max(outside, key=lambda p: grow.reshape(-1)[p].sum()))


@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**16),
    regrow=st.booleans(),
    swap=st.floats(0, 1),
    prune=st.integers(0, 2),
)
def test_exchange_against_a_loop(
    case: tuple[str, tuple[int, ...]], seed: int, regrow: bool, swap: float, prune: int
) -> None:
    text, shape = case
    pattern = parse_pattern(text)
    assert pattern is not None
    rng = np.random.default_rng(seed)
    groups = groups_of(text, shape)
    size, have = len(groups[0][0]), rng.integers(1, len(groups[0]) + 1)
    prune = min(prune, have - 1)
    drop, grow = rng.permutation(math.prod(shape)).reshape(shape) * 1.0, rng.permutation(math.prod(shape)) * 1.0
    mask = np.zeros(shape, bool)
    for group in groups:
        for unit in rng.permutation(len(group))[:have]:
            for index in group[unit]:
                mask[index] = True
    wanted = round(swap * have * len(groups)) * size
    dropped, grown = pattern.exchange(
        torch.from_numpy(drop).reshape(-1),
        torch.from_numpy(grow),
        torch.from_numpy(mask),
        prune * len(groups) * size,
        wanted,
        regrow,
    )
    left, expected = _exchanged(groups, drop, grow.reshape(shape), mask, prune, wanted // size, regrow)
    after = mask.copy().reshape(-1)
    after[dropped.numpy()] = False
    assert set(np.flatnonzero(after)) == set(np.flatnonzero(left))
    assert not after[grown.numpy()].any()
    after[grown.numpy()] = True
    np.testing.assert_array_equal(after.reshape(shape), expected)
    assert set(counts_in_groups(after.reshape(shape), text)) == {have - prune}


def _exchanged(
    groups: Groups, drop: Any, grow: Any, mask: Any, prune: int, swap: int, regrow: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks before and after growth."""

    def total(score: Any, unit: list[tuple[int, ...]]) -> float:
        return sum(score[index] for index in unit)

    left, candidates = mask.copy(), []
    for number, group in enumerate(groups):
        active = sorted((unit for unit in group if mask[unit[0]]), key=lambda unit: total(drop, unit))
        for unit in active[:prune]:
            for index in unit:
                left[index] = False
        most = len(active) - prune if regrow else min(len(active) - prune, len(group) - len(active))
        candidates += [(total(drop, unit), number, unit) for unit in active[prune : prune + most]]
    need = [0] * len(groups)
    for _, number, unit in sorted(candidates)[:swap]:
        need[number] += 1
        for index in unit:
            left[index] = False
    after = left.copy()
    for number, group in enumerate(groups):
        free = [unit for unit in group if not (left if regrow else mask)[unit[0]]]
        for unit in sorted(free, key=lambda unit: -total(grow, unit))[: need[number]]:
            for index in unit:
                after[index] = True
    return left, after


ALGORITHMS: dict[str, Any] = {"rigl": eq.RigL, "set": eq.SET, "mest": eq.MEST, "granet": eq.GraNet, "gmp": eq.GMP,
                              "snfs": eq.SNFS, "static": eq.Static}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("pattern", ["2:4", "transposable 2:4", "4x2", "fan_in"])
def test_the_pattern_holds_after_every_step(name: str, pattern: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 2), nn.Flatten(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"sparsity": 0.5 if "2:4" in pattern else 0.7, "pattern": pattern}
    updates = {} if name == "static" else {"every": 2}
    topology = ALGORITHMS[name](**options, **updates).attach(model, optimizer, total_steps=24)
    masks = []
    for _ in range(24):
        loss = model(torch.randn(8, 4, 5, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer, mask in topology.masks.items():
            assert len(set(counts_in_groups(mask.numpy(), pattern))) == 1
            assert not model.get_parameter(layer).detach()[~mask].any()
        masks.append(topology.masks)
    moved = any(not torch.equal(masks[0][layer], masks[-1][layer]) for layer in masks[0])
    assert moved == (name != "static")
    active = {layer: int(mask.sum()) for layer, mask in topology.masks.items()}
    if "2:4" in pattern:
        assert all(count == topology.masks[layer].numel() // 2 for layer, count in active.items())
    assert active == {layer.name: layer.final for layer in topology.layers}


@pytest.mark.parametrize("pattern", ["2:4", "4x2", "fan_in"])
def test_both_storages_train_the_same(pattern: str) -> None:
    sparsity = 0.5 if pattern == "2:4" else 0.9
    x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
    ends = []
    for packed in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        algorithm = eq.SET(sparsity=sparsity, pattern=pattern, every=3)
        model = eq.sparse.pack(model, algorithm) if packed else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        topology = algorithm.attach(model, optimizer, total_steps=20)
        for _ in range(20):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((topology.masks, nn.functional.cross_entropy(model(x), y).item()))
    for name, mask in ends[0][0].items():
        assert torch.equal(mask, ends[1][0][name])
        assert len(set(counts_in_groups(mask.numpy(), pattern))) == 1
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


def test_weights_that_do_not_divide_stay_dense_with_a_warning() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(
        UserWarning, match='the pattern "2:4" stay dense: "0.weight" \\(3 inputs are no multiple of 4\\)'
    ):
        topology = eq.Static(sparsity=0.5, pattern="2:4").attach(model, optimizer)
    assert list(topology.masks) == ["1.weight"]


def test_a_pruned_model_keeps_its_largest_units() -> None:
    model = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0, [0, 1, 2]] = torch.tensor([3.0, -2.0, 1.0])
        model.weight[0, 4] = 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        topology = eq.Static(sparsity=0.5, pattern="2:4").attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mask = topology.masks["weight"]
    assert mask[0, :4].tolist() == [True, True, False, False]
    assert mask[0, 4]
    assert set(counts_in_groups(mask.numpy(), "2:4")) == {2}


def test_a_resumed_run_is_the_same_to_the_bit() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, eq.Topology]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, eq.RigL(sparsity=0.5, pattern="2:4", every=2).attach(model, optimizer, 20)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, half = make(), make()
    train(*whole[:2], range(20))
    train(*half[:2], range(9))
    resumed = make()
    for target, source in zip(resumed, half, strict=True):
        target.load_state_dict(source.state_dict())
    train(*resumed[:2], range(9, 20))
    for ours, theirs in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eq.RigL(pattern="4:4", sparsity=0.5), 'pattern="4:4": n:m has fewer active weights than weights'),
        (lambda: eq.RigL(pattern="2:4"), 'sparsity=0.9: pattern="2:4" has sparsity=0.5; set sparsity=0.5 too'),
        (lambda: eq.SRSTE(pattern="1:4"), 'sparsity=0.5: pattern="1:4" has sparsity=0.75; set sparsity=0.75 too'),
        (lambda: eq.RigL(pattern="butterfly"), 'pattern="butterfly": expected "2:4", "transposable 2:4"'),
        (
            lambda: eq.RigL(pattern="butterfly 4x4"),
            'pattern="butterfly 4x4": its mask never changes; use the topology',
        ),
        (lambda: eq.SRSTE(pattern="butterfly 4x4"), 'pattern="butterfly 4x4": its mask never changes'),
        (lambda: eq.RigL(pattern="1x1"), 'pattern="1x1": a block has several weights'),
        (lambda: eq.RigL(pattern="0x4"), 'pattern="0x4": a block has several weights'),
        (lambda: eq.RigL(pattern="16x1", min_fan_in=2), "min_fan_in=2: not with pattern"),
        (lambda: eq.RigL(pattern="2:4", sparsity=0.5, distribution=[0.5]), "leave out the distribution"),
        (lambda: eq.SET(pattern="fan_in", criterion="signed"), 'pattern=fan_in: only with criterion="magnitude"'),
        (lambda: eq.BSRNet(pattern="16x1"), 'pattern="16x1": BSR-Net draws single weights; use rigl, set or granet'),
        (lambda: eq.BSRNet(pattern="2:4"), 'pattern="2:4": BSR-Net draws single weights; use rigl, set or granet'),
        (lambda: eq.Hydra(pattern="2:4"), 'pattern="2:4": HYDRA keeps single weights; use sr-ste'),
        (lambda: eq.SRigL(pattern="2:4"), 'pattern="2:4": SRigL has the pattern "fan_in"; use rigl for other'),
        (lambda: eq.SRigL(pattern=""), 'pattern="": SRigL has the pattern "fan_in"'),
    ],
)
def test_wrong_patterns(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_blocks_larger_than_every_weight() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(
        UserError, match=r'no weight can have the pattern "16x1": "weight" \(8 outputs and 8 inputs .*; 8x1 would fit'
    ):
        eq.Static(pattern="16x1").attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("shape", "block", "sparsity", "strides"),
    [
        ((32, 32), (4, 4), 0.9, 0),
        ((32, 32), (4, 4), 0.6, 2),
        ((32, 32), (4, 4), 0.0, 3),
        ((32, 64, 3, 3), (4, 8), 0.5, 3),
        ((16, 64), (4, 4), 0.5, 1),
        ((48, 8), (4, 2), 0.2, 2),
    ],
)
def test_the_butterfly_block_by_block(
    shape: tuple[int, ...], block: tuple[int, int], sparsity: float, strides: int
) -> None:
    """Block (i, j) is active if i = j or i xor j is one of the first powers of two."""
    layer: Any = nn.Conv2d(shape[1], shape[0], 3) if len(shape) == 4 else nn.Linear(shape[1], shape[0])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    options: dict[str, Any] = {"distribution": [1 - sparsity], "sparsity": 0.5}
    topology = eq.Static(pattern=f"butterfly {block[0]}x{block[1]}", **options).attach(layer, optimizer)
    rows, columns = shape[0] // block[0], shape[1] // block[1]
    small = min(rows, columns)
    expected = np.zeros(shape, bool)
    for i, j in itertools.product(range(rows), range(columns)):
        if i % small == j % small or any(i % small ^ j % small == 2**k for k in range(strides)):
            expected[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] = True
    np.testing.assert_array_equal(topology.masks["weight"].numpy(), expected)
    assert expected.sum() == (1 + strides) * math.prod(shape) // small == topology.active


def test_a_butterfly_of_blocks_that_are_no_power_of_two() -> None:
    model = nn.Linear(48, 48)
    with pytest.raises(UserError, match='"butterfly 16x16": "weight" \\(3 blocks are no power of two\\)'):
        eq.Static(pattern="butterfly 16x16").attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_yaml_reads_a_pattern_as_text() -> None:
    assert parse_yaml("{pattern: 2:4, steps: 12, rate: 1.5}", "x") == {"pattern": "2:4", "steps": 12, "rate": 1.5}


@pytest.mark.parametrize("pattern", [NM(2, 4), Transposable(2, 4), Block(16, 1), Butterfly(8, 4), FanIn()])
def test_patterns_are_written_as_they_are_read(pattern: Pattern) -> None:
    assert parse_pattern(str(pattern)) == pattern
