"""Blocks of 16 outputs x 1 input: how they are found, and their kernels against dense PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import library, operators
from equipoise.kernels.arena import NO_BORDER
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.kernels.blocks import find
from equipoise.kernels.geometry import Border, ConvShape
from equipoise.kernels.steps import KernelSteps
from equipoise.kernels.taps import Pattern

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())

small = st.integers(1, 3)
borders = st.tuples(st.integers(0, 2), st.integers(0, 2))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[ConvShape, tuple[int, int]]:
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    shape = ConvShape(
        16 * groups * draw(small),
        groups * draw(st.integers(1, 9)),
        draw(st.tuples(small, small)),
        draw(st.tuples(small, small)),
        draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        draw(st.tuples(small, small)),
        groups,
    )
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    axes = zip(size, shape.kernel, shape.padding, shape.dilation, strict=True)
    assume(all(s + 2 * p > d * (k - 1) for s, k, p, d in axes))
    return shape, size


def random_mask(shape: ConvShape, density: float) -> Tensor:
    blocks = torch.rand(shape.out_channels // 16, 1, shape.in_channels // shape.groups, *shape.kernel) < density
    blocks[0, 0, 0, 0, 0] = True
    return blocks.expand(-1, 16, *[-1] * 3).flatten(0, 1)


def near(found: Tensor, exact: Tensor, tolerance: float, rounded: bool) -> None:
    """Compare with a result in float64. One that was rounded to bf16 has a relative error of up to 2^-8."""
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * 2.0**-8 if rounded else 1e-4, atol=tolerance)


@settings(max_examples=60)
@given(case=convolutions(), images=st.integers(1, 70), border=borders, threads=st.sampled_from([1, 2, 5]),
       density=st.sampled_from([0.05, 0.4, 1.0]), half=st.booleans(), seed=st.integers(0, 999))  # fmt: skip
def test_convolution_and_gradients(
    case: tuple[ConvShape, tuple[int, int]],
    images: int,
    border: Border,
    threads: int,
    density: float,
    half: bool,
    seed: int,
) -> None:
    shape, size = case
    torch.manual_seed(seed)
    mask = random_mask(shape, density)
    index = mask.flatten().nonzero().flatten()
    pattern = Pattern(shape, index)
    assert pattern.blocks is not None
    assert pattern.blocks.count == len(index) // 16
    maps = torch.bfloat16 if half else torch.float32
    exact = [torch.randn(s).to(dtype).double().requires_grad_()
             for s, dtype in (((images, shape.in_channels, *size), maps), ((len(index),), torch.float32),
                              ((shape.out_channels,), torch.float32))]  # fmt: skip
    mine = [tensor.detach().float().requires_grad_() for tensor in exact]
    weight = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, exact[1])
    expected = F.conv2d(exact[0], weight, exact[2], shape.stride, shape.padding, shape.dilation, shape.groups)
    dy = torch.randn(expected.shape).to(maps).double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        blocked = operators.conv(to_blocked(mine[0], border, maps), mine[1], mine[2], pattern, border)
        y = from_blocked(blocked)
        gradients = torch.autograd.grad(y, mine, dy.float())
    finally:
        torch.set_num_threads(before)
    assert blocked.data.dtype is maps
    near(y, expected, 1e-4, rounded=half)
    wanted = torch.autograd.grad(expected, exact, dy)
    near(gradients[0], wanted[0], 1e-3, rounded=half)
    for found, sums in zip(gradients[1:], wanted[1:], strict=True):
        near(found, sums, 1e-3, rounded=False)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_maps_that_are_written_past_the_caches(threads: int) -> None:
    torch.manual_seed(0)
    shape = ConvShape(64, 64, (3, 3), (1, 1), (1, 1))
    mask = random_mask(shape, 0.1)
    x = torch.randn(32, 64, 24, 24).to(torch.bfloat16).double().requires_grad_()
    weight = torch.randn(mask.shape) * mask
    expected = F.conv2d(x, weight.double(), None, 1, 1)
    dy = torch.randn(expected.shape).to(torch.bfloat16).double()
    mine = x.detach().float().requires_grad_()
    pattern = Pattern(shape, mask.flatten().nonzero().flatten())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = from_blocked(operators.conv(to_blocked(mine, (1, 1), torch.bfloat16), weight[mask], None, pattern))
        found = torch.autograd.grad(y, mine, dy.float())[0]
    finally:
        torch.set_num_threads(before)
    near(y, expected, 1e-4, rounded=True)
    near(found, torch.autograd.grad(expected, x, dy)[0], 1e-4, rounded=True)


@given(outputs=st.integers(1, 40), inputs=st.integers(1, 3), groups=st.sampled_from([1, 2]), data=st.data())
def test_blocks_are_found_if_and_only_if_all_weights_form_them(
    outputs: int, inputs: int, groups: int, data: st.DataObject
) -> None:
    shape = ConvShape(outputs * groups, inputs * groups, (2, 1), groups=groups)
    mask = np.zeros((outputs * groups, inputs, 2), bool)
    for first in range(0, outputs * groups, 16):
        mask[first : first + 16] = (
            data.draw(st.integers(0, 2 ** (2 * inputs) - 1)) >> np.arange(2 * inputs).reshape(inputs, 2) & 1
        )
    if data.draw(st.booleans()):
        mask.flat[data.draw(st.integers(0, mask.size - 1))] ^= True
    whole = outputs % 16 == 0 and all((mask[i] == mask[i // 16 * 16]).all() for i in range(len(mask)))
    found = find(shape, np.flatnonzero(mask).astype(np.int32))
    assert (found is not None) == (whole and bool(mask.any()))
    if found is not None:
        values = np.random.default_rng(0).random(mask.sum(), np.float32)
        assert (found.values(found.weights(values)) == values).all()
        dense = np.zeros(mask.shape, np.float32)
        dense[mask] = values
        for weights in found.weights(values).reshape(-1, 16):  # each tap: one input and position of 16 outputs
            assert any((dense[g : g + 16, i, k] == weights).all() for g in range(0, len(mask), 16)
                       for i in range(inputs) for k in range(2))  # fmt: skip


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("size", [(1, 1), (9, 8), (5, 21)])
def test_a_program_runs_blocks_as_torch_does(size: tuple[int, int], lanes: int, relu: bool) -> None:
    torch.manual_seed(0)
    kernel = (1, 1) if size == (1, 1) else (3, 3)
    shape = ConvShape(32, 6, kernel, (2, 1), (kernel[0] // 2, kernel[1] // 2))
    mask = random_mask(shape, 0.3)
    weight, bias, x = torch.randn(mask.shape) * mask, torch.randn(32), torch.randn(2 * lanes, 6, *size)
    steps = KernelSteps(2, lanes)
    given_ = steps.buffer((6, *size))
    index = mask.flatten().nonzero().flatten().numpy()
    y = steps.conv(given_, shape, index, weight[mask].numpy(), bias.numpy(), relu)
    found = torch.from_numpy(steps.buffers(given_, y).compute(x.numpy(), threads=2))
    expected = F.conv2d(x, weight, bias, shape.stride, shape.padding)
    torch.testing.assert_close(found, expected.relu() if relu else expected, rtol=1e-4, atol=1e-5)


def test_inputs_of_other_channels_or_borders_are_refused() -> None:
    shape = ConvShape(16, 4, (3, 3), padding=(1, 1))
    pattern = Pattern(shape, torch.arange(shape.weight_numel))
    values = torch.zeros(shape.weight_numel)
    with pytest.raises(UserError, match="takes 4 channels, the input has 3"):
        operators.conv(to_blocked(torch.zeros(1, 3, 5, 5), NO_BORDER), values, None, pattern)
    with pytest.raises(UserError, match="values"):
        operators.conv(to_blocked(torch.zeros(1, 4, 5, 5), (1, 1)), values[1:], None, pattern)
