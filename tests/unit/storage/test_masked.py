"""One sparse weight: its mask, its record of exploration, and the indices that it drops and grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage import masked
from equipoise.storage.masked import ACTIVE, DROPPED, MaskedWeight


def make(active: int, *shape: int, seed: int = 0, channels_last: bool = False) -> MaskedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if channels_last:
        values = values.to(memory_format=torch.channels_last)
    first = torch.randperm(values.numel(), generator=generator)[:active]
    return MaskedWeight("layer.weight", nn.Parameter(values), first, active)


def index_set(indices: Tensor) -> set[int]:
    assert len(set(indices.tolist())) == len(indices)  # no place twice
    return set(indices.tolist())


@given(size=st.tuples(st.integers(1, 12), st.integers(1, 12)), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_the_first_mask_has_exactly_its_count(size: tuple[int, int], share: float, seed: int) -> None:
    active = round(share * size[0] * size[1])
    layer = make(active, *size, seed=seed)
    assert int(layer.mask().sum()) == layer.active == layer.explored() == active


def test_the_first_mask_is_uniform() -> None:
    drawn = torch.stack([make(3, 3, 4, seed=seed).mask() for seed in range(2000)]).sum(0).numpy()
    chi_square = ((drawn - 500) ** 2 / 500).sum()
    assert chi_square < 40  # 11 degrees of freedom; the chance of more is 4e-5


def test_a_mask_takes_one_byte_per_weight() -> None:
    layer = make(5, 6, 7)
    assert layer.activity.element_size() == 1
    assert layer.activity.shape == layer.parameter.shape


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 50, 10**6])  # of the weights masked at a time: a row, some, all
def test_hiding_sets_inactive_entries_to_zero_whatever_was_there(
    channels_last: bool, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "CHUNK", block)
    layer = make(20, 4, 3, 3, 3, channels_last=channels_last)
    for garbage in (torch.nan, torch.inf, -torch.inf, 3.0, -1e-7):
        tensor = torch.full(layer.parameter.shape, garbage, dtype=dtype)
        before = tensor.clone()
        layer.hide_inactive(tensor)
        assert torch.equal(tensor != 0, layer.mask())
        torch.testing.assert_close(tensor[layer.mask()], before[layer.mask()], rtol=0, atol=0, equal_nan=True)
        assert not torch.signbit(tensor[~layer.mask()]).any()


def test_a_dense_layer_is_not_touched() -> None:
    layer = make(12, 3, 4)
    tensor = torch.full((3, 4), torch.nan)
    layer.hide_inactive(tensor)
    assert tensor.isnan().all()


scores = st.lists(st.integers(0, 10**6), min_size=12, max_size=12, unique=True)


@given(values=scores, active=st.integers(0, 12), data=st.data())
def test_lowest_are_the_lowest_of_the_active(values: list[int], active: int, data: st.DataObject) -> None:
    layer = make(active, 3, 4)
    count = data.draw(st.integers(0, active))
    mask = layer.mask().flatten().numpy()
    score = np.array(values, float)
    oracle = sorted(np.flatnonzero(mask), key=lambda i: score[i])[:count]
    assert index_set(layer.lowest(torch.tensor(score), count)) == set(oracle)


@given(values=scores, active=st.integers(1, 12), regrow=st.booleans(), data=st.data())
def test_highest_are_the_highest_of_the_inactive(
    values: list[int], active: int, regrow: bool, data: st.DataObject
) -> None:
    layer = make(active, 3, 4)
    mask = layer.mask().flatten().numpy()
    dropped = np.flatnonzero(mask)[: data.draw(st.integers(0, active))]
    candidates = np.flatnonzero(~mask)
    if regrow:
        candidates = np.concatenate([candidates, dropped])
    count = data.draw(st.integers(0, len(candidates)))
    score = np.array(values, float)
    oracle = sorted(candidates, key=lambda i: -score[i])[:count]
    assert index_set(layer.highest(torch.tensor(score), count, torch.tensor(dropped), regrow)) == set(oracle)


@given(st.lists(st.sampled_from([0.0, 1.0, torch.inf, torch.nan]), min_size=12, max_size=12), st.integers(0, 6))
def test_overflow_never_makes_an_inactive_place_drop(values: list[float], count: int) -> None:
    """Infinite and undefined scores tie with nothing: counts stay exact."""
    layer = make(6, 3, 4)
    for dtype in (torch.float32, torch.float64):
        score = torch.tensor(values, dtype=dtype)
        dropped = layer.lowest(score, count)
        assert layer.mask().flatten()[dropped].all()
        grown = layer.highest(score, count, dropped, regrow=False)
        assert not layer.mask().flatten()[grown].any()
        assert len(index_set(dropped)) == len(index_set(grown)) == count


@given(
    values=st.lists(st.sampled_from([0.0, 0.1, 0.3, 7.0]), min_size=12, max_size=12),
    noise=st.lists(st.integers(-9, 9), min_size=12, max_size=12),
    count=st.integers(0, 6),
)
def test_rounding_does_not_decide_ties_in_float64(values: list[float], noise: list[int], count: int) -> None:
    layer = make(6, 3, 4)
    mask = layer.mask().flatten().numpy()
    exact = np.array(values)
    score = torch.tensor(exact * (1 + 2.0**-52 * np.array(noise)))
    lowest = sorted(np.flatnonzero(mask), key=lambda i: (exact[i], i))[:count]
    highest = sorted(np.flatnonzero(~mask), key=lambda i: (-exact[i], i))[:count]
    assert index_set(layer.lowest(score, count)) == set(lowest)
    assert index_set(layer.highest(score, count, torch.tensor([], dtype=torch.long), regrow=False)) == set(highest)


@pytest.mark.parametrize("channels_last", [False, True])
def test_rewiring_moves_the_mask_and_clears_weight_and_state(channels_last: bool) -> None:
    layer = make(10, 2, 3, 2, 2, channels_last=channels_last)
    state = torch.ones_like(layer.parameter)
    before = layer.mask()
    active, inactive = (side.flatten().nonzero().squeeze(1) for side in (before, ~before))
    dropped, grown = active[:4], torch.cat([inactive[:2], active[:1]])  # one of the dropped comes back
    kept_values = layer.weight[active[4:]].clone()
    layer.rewire(dropped, grown, [state])
    after = layer.mask().flatten()
    assert layer.active == int(after.sum()) == 9
    assert after[grown].all()
    assert not after[active[1:4]].any()
    assert torch.equal(layer.weight[active[4:]], kept_values)
    changed = torch.cat([dropped, grown])
    assert torch.count_nonzero(layer.weight[changed]) == 0
    assert torch.count_nonzero(state.flatten()[changed]) == 0
    assert torch.count_nonzero(state) == state.numel() - len(set(changed.tolist()))


def test_exploration_remembers_what_was_ever_active() -> None:
    layer = make(3, 3, 4)
    seen = set(layer.mask().flatten().nonzero().flatten().tolist())
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        dropped = layer.lowest(torch.rand(12, generator=generator), 1)
        grown = layer.highest(torch.rand(12, generator=generator), 1, dropped, regrow=True)
        layer.rewire(dropped, grown, [])
        seen |= set(grown.tolist())
        assert layer.explored() == len(seen)
    assert set(layer.activity.flatten().tolist()) <= {ACTIVE, DROPPED, 0}


def test_the_state_of_another_weight_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r'"layer.weight" has shape \(4, 5\), the weight has \(3, 4\)') as error:
        make(3, 3, 4).check_state(make(5, 4, 5).state_dict())
    assert "\n" not in str(error.value)


@pytest.mark.gpu
def test_masks_follow_the_weight_to_another_device() -> None:
    layer = make(6, 3, 4)
    before = layer.mask()
    layer.parameter.data = layer.parameter.data.cuda()
    assert layer.mask().is_cuda
    assert torch.equal(layer.mask().cpu(), before)
    average = torch.ones(3, 4)  # kept on the host
    layer.hide_inactive(average)
    assert torch.equal(average != 0, before)
