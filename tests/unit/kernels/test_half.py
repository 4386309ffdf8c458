"""bf16 activations in the CPU kernels, against dense PyTorch in float64.

The references start from the same bf16 numbers, so a result may differ by its own rounding to bf16 (relative error at
most 2^-8) and by the error of float32 sums.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import arena, boundary, library, operators
from equipoise.kernels.arena import Border
from equipoise.kernels.blocked import Blocked, from_blocked, to_blocked
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.operators import BATCH, FIXED, IDENTITY, Fused
from equipoise.kernels.taps import Pattern

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())
BF16 = torch.bfloat16
ROUNDOFF = 2.0**-8
borders = st.tuples(st.integers(0, 2), st.integers(0, 2))
small = st.integers(1, 3)


def half(x: Tensor, border: Border = (0, 0)) -> Blocked:
    return to_blocked(x, border, BF16)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def rounded(*shape: int) -> Tensor:
    """Standard normal bf16 numbers, in float64."""
    return torch.randn(shape).to(BF16).double()


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.double()


def assert_rounded_once(mine: Tensor, exact: Tensor, terms: int) -> None:
    """Sums of `terms` products in float32, then rounded to bf16."""
    torch.testing.assert_close(mine.double(), exact, rtol=1.01 * ROUNDOFF, atol=1e-5 * (1 + terms) ** 0.5)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.sampled_from([1, 1, 2])),
    st.tuples(st.tuples(small, small), st.tuples(small, small), st.tuples(small, small), borders),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 70),
    st.sampled_from([0.0, 0.02, 0.1, 1.0]),
    st.booleans(),
    st.integers(0, 999),
)
def test_convolution_and_its_gradients(
    channels: tuple[int, int, int],
    window: tuple[Border, Border, Border, Border],
    size: Border,
    images: int,
    density: float,
    biased: bool,
    seed: int,
) -> None:
    (out, inputs, groups), (kernel, stride, dilation, padding) = channels, window
    assume(all(s + 2 * p > d * (k - 1) for s, k, p, d in zip(size, kernel, padding, dilation, strict=True)))
    shape = ConvShape(groups * out, groups * inputs, kernel, stride, padding, dilation, groups)
    torch.manual_seed(seed)
    x = rounded(images, shape.in_channels, *size)
    weight = torch.randn(shape.out_channels, inputs, *kernel).double()
    bias = torch.randn(shape.out_channels).double()
    mask = torch.rand(weight.shape) < density
    index = mask.flatten().nonzero().flatten()

    xd, wd, bd = leaf(x), leaf(weight * mask), leaf(bias)
    exact = F.conv2d(xd, wd, bd if biased else None, stride, padding, dilation, groups)
    dy = rounded(*exact.shape)
    exact.backward(dy)

    xs, values, bs = leaf(x.float()), leaf(weight.flatten()[index].float()), leaf(bias.float())
    y = operators.conv(half(xs, padding), values, bs if biased else None, Pattern(shape, index))
    mine = from_blocked(y)
    mine.backward(dy.float())

    assert y.data.dtype is BF16
    taps, positions = weight[0].numel(), images * exact.shape[2] * exact.shape[3]
    assert_rounded_once(mine, exact, taps)
    assert_rounded_once(grad(xs), grad(xd), taps * shape.out_channels)
    torch.testing.assert_close(grad(values), grad(wd).flatten()[index], rtol=1e-4, atol=1e-5 * (1 + positions) ** 0.5)
    if biased:
        torch.testing.assert_close(grad(bs), grad(bd), rtol=1e-4, atol=1e-5 * (1 + positions) ** 0.5)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(2, 70), st.integers(1, 5), st.integers(2, 7), st.integers(2, 7)),
    st.sampled_from([IDENTITY, FIXED, BATCH]),
    st.booleans(),
    st.sampled_from(["nothing", "pool", "residual"]),
    borders,
    st.integers(0, 999),
)
def test_fused_norm_relu_pool(
    shape: tuple[int, ...], norm: int, relu: bool, extra: str, border: Border, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual = (3 * rounded(*shape) + 5).to(BF16).double(), rounded(*shape)
    gamma, beta, mean = torch.randn(3, shape[1]).double()
    var = torch.rand(shape[1]).double() + 0.1
    running = (mean.float(), var.float())

    xd, rd, gd, bd = (leaf(t) for t in (x, residual, gamma, beta))
    exact = F.batch_norm(xd, mean, var, gd, bd, norm == BATCH, 0.1, 1e-5) if norm else xd
    exact = exact + rd if extra == "residual" else exact
    exact = exact.relu() if relu else exact
    exact = F.max_pool2d(exact, 2) if extra == "pool" else exact
    dy = rounded(*exact.shape)
    exact.backward(dy)

    xs, rs, gs, bs = (leaf(t.float()) for t in (x, residual, gamma, beta))
    how = Fused(norm, relu, extra == "pool", 1e-5, 0.1, border)
    parameters = (gs, bs, running) if norm else (None, None, None)
    mine = from_blocked(operators.fused(half(xs), how, *parameters, half(rs) if extra == "residual" else None))
    mine.backward(dy.float())

    torch.testing.assert_close(mine.double(), exact, rtol=1.01 * ROUNDOFF, atol=1e-4)
    # A value within float32 rounding of a kink may fall on its other side; bf16 numbers are often equal, so that the
    # maximum of a window may be another of two values whose float32 images differ.
    far = (grad(xs) - grad(xd)).abs() > 1.01 * ROUNDOFF * grad(xd).abs() + 1e-3
    assert far.sum() <= 0.01 * far.numel() + 2
    if norm:
        torch.testing.assert_close(running[0].double(), mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(running[1].double(), var, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad(bs), grad(bd), rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(grad(gs), grad(gd), rtol=1e-3, atol=2e-2)
    if extra == "residual":
        far = (grad(rs) - grad(rd)).abs() > 1e-6
        assert far.sum() <= 0.01 * far.numel() + 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.sampled_from([(3,), (2, 5), (3, 4, 6)]), borders, st.booleans())
def test_layout_rounds_as_torch_does(images: int, shape: tuple[int, ...], border: Border, flipped: bool) -> None:
    x = torch.randn(images, *shape)
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if flipped else x
    blocked = half(x, border)
    assert torch.equal(from_blocked(blocked), x.to(BF16).float())
    lanes = blocked.data.permute(0, 4, 1, 2, 3).flatten(0, 1)
    assert torch.equal(lanes[:images].reshape(x.shape), x.to(BF16))
    assert not lanes[images:].any()


def test_ties_infinities_and_nan_are_rounded_as_in_torch() -> None:
    ties = torch.arange(-(2**12), 2**12, dtype=torch.float32) * 2.0**-8 + 1  # half-way numbers among them
    bits = torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7F800001, 0x00000001, 0x00018000], dtype=torch.int32)
    special = torch.cat([bits, bits | -(2**31)]).view(torch.float32)
    x = torch.cat([ties, special])[None]
    mine = from_blocked(half(x))
    torch.testing.assert_close(mine, x.to(BF16).float(), rtol=0, atol=0, equal_nan=True)


def test_results_are_rounded_as_in_torch() -> None:
    """One product per output, which float32 rounds as torch does; even and odd images take different registers."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 1, 8, 9).to(BF16).float(), 1 + 3 * 2.0**-10
    pattern = Pattern(ConvShape(1, 1), torch.zeros(1, dtype=torch.int64))
    out = operators.conv(half(x), torch.tensor([weight]), None, pattern)
    assert torch.equal(from_blocked(out), (weight * x).to(BF16).float())
    normed = operators.fused(
        half(x), Fused(FIXED), torch.tensor([weight]), None, (torch.zeros(1), torch.ones(1) - 1e-5)
    )
    torch.testing.assert_close(from_blocked(normed), (weight * x).to(BF16).float(), rtol=ROUNDOFF, atol=0)


def test_a_diverged_activation_stays_visible() -> None:
    x = torch.ones(2, 1, 4, 4)
    x[0, 0, 1, 1] = float("nan")
    pattern = Pattern(ConvShape(1, 1), torch.zeros(1, dtype=torch.int64))
    out = from_blocked(operators.max_pool(operators.conv(half(x), torch.ones(1), None, pattern), relu=True))
    assert torch.equal(out.isfinite(), F.max_pool2d(x.relu(), 2).isfinite())


@pytest.mark.parametrize("cell", range(4))
def test_every_nan_of_a_window_stays_visible(cell: int) -> None:
    x = torch.ones(64, 1, 2, 2)
    x[7, 0].view(-1)[cell] = float("nan")
    assert torch.equal(from_blocked(operators.max_pool(half(x)))[:, 0, 0, 0].isnan(), torch.arange(64) == 7)


@pytest.mark.parametrize("images", [64, 70])
@pytest.mark.parametrize("mean", [0.0, 24.0, 3072.0])
def test_variance_does_not_cancel(mean: float, images: int) -> None:
    """Two neighbouring bf16 numbers far from zero, whose squares differ in digits that float32 does not have."""
    torch.manual_seed(0)
    spacing = 2.0**-7 * max(mean / 1.5, 1)
    x = (mean + spacing * torch.randint(2, (images, 3, 8, 8))).double()
    assert torch.equal(x.to(BF16).double(), x)
    running = torch.zeros(3), torch.zeros(3)
    operators.fused(half(x.float()), Fused(BATCH, momentum=1.0), None, None, running)
    torch.testing.assert_close(running[0].double(), x.mean((0, 2, 3)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(running[1].double(), x.var((0, 2, 3)), rtol=1e-3, atol=0)


def test_sums_are_float32() -> None:
    """A bf16 sum of ones would end at 256."""
    shape = ConvShape(1, 1024)
    values = leaf(torch.ones(1024))
    out = from_blocked(operators.conv(half(torch.ones(64, 1024)), values, None, Pattern(shape, torch.arange(1024))))
    assert out.eq(1024).all()
    out.backward(torch.ones_like(out) / 64)
    assert grad(values).eq(1).all()


def step(images: int) -> list[Tensor]:
    torch.manual_seed(0)
    shape = ConvShape(24, 20, (3, 3), (1, 1), (1, 1))
    index = (torch.rand(shape.weight_numel) < 0.1).nonzero().flatten()
    x, values = leaf(torch.randn(images, 20, 9, 9)), leaf(torch.randn(index.numel()))
    y = operators.conv(half(x, (1, 1)), values, None, Pattern(shape, index))
    out = from_blocked(operators.fused(y, Fused(BATCH, relu=True, pool=True)))
    out.square().sum().backward()
    assert x.grad is not None
    assert values.grad is not None
    return [out.detach(), x.grad, values.grad]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_every_time_at_a_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        reference = step(33)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(step(33), reference, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("outputs", [1, 16])
@pytest.mark.parametrize(("density", "size", "padding"), [(0.02, 14, 1), (0.4, 14, 0), (0.2, 3, 1), (0.2, 5, 2)])
def test_both_gradients(density: float, size: int, padding: int, outputs: int, threads: int) -> None:
    """Threads divide tiles if there are few taps and many positions, else channels; many taps form several blocks."""
    torch.manual_seed(1)
    shape = ConvShape(48, 40, (3, 3), (1, 1), (padding, padding))
    index = (torch.rand(48 // outputs, 360) < density).repeat_interleave(outputs, 0).flatten().nonzero().flatten()
    x, weight = rounded(70, 40, size, size), torch.zeros(48, 40, 3, 3).double()
    weight.view(-1)[index] = torch.randn(index.numel()).double()
    dy = rounded(70, 48, *shape.output((size, size)))
    xd, wd = leaf(x), leaf(weight)
    F.conv2d(xd, wd, padding=padding).backward(dy)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        border = shape.grad_border((size, size))
        gradient, values = half(dy.float(), border).data, weight.view(-1)[index].float()
        pattern = Pattern(shape, index)
        assert (pattern.blocks is not None) == (outputs == 16)
        arguments = (half(x.float(), (padding, padding)).data, gradient, values, pattern, True, (1, 0))
        dx, dvalues, dbias = operators.both_grads(*arguments)
    finally:
        torch.set_num_threads(before)
    assert arena.has_border(dx, (1, 0))
    assert_rounded_once(from_blocked(Blocked(dx, 70)), grad(xd), 48 * 9)
    torch.testing.assert_close(dvalues.double(), grad(wd).flatten()[index], rtol=1e-4, atol=2e-3)
    assert dbias is not None
    torch.testing.assert_close(dbias.double(), dy.sum((0, 2, 3)), rtol=1e-4, atol=2e-3)


def test_average_pool_and_flatten() -> None:
    torch.manual_seed(0)
    x, images = rounded(40, 3, 6, 6), 40
    xd, xs = leaf(x), leaf(x.float())
    exact = F.avg_pool2d(xd, 3).flatten(1)
    mine = from_blocked(operators.flatten(operators.avg_pool(half(xs, (1, 1)), (3, 3))))
    dy = rounded(*exact.shape)
    exact.backward(dy)
    mine.backward(dy.float())
    assert mine.shape == (images, 12)
    assert_rounded_once(mine, exact, 9)
    assert_rounded_once(grad(xs), grad(xd), 1)


def test_other_types_and_mixtures_are_refused() -> None:
    x = torch.ones(2, 3, 4, 4)
    with pytest.raises(UserError, match=r"float32 or bfloat16, not torch\.float16"):
        to_blocked(x, dtype=torch.float16)
    with pytest.raises(UserError, match=r"residual must have the shape|cannot be used together"):
        operators.add(half(x), to_blocked(x))
    wide = Blocked(arena.take((1, 3, 4, 4), dtype=BF16).fill_(0), 2)
    other = Blocked(torch.zeros(1, 3, 4, 4, 32), 2)
    with pytest.raises(UserError, match="cannot be used together"):
        operators.add(wide, other)
    with pytest.raises(UserError, match="the last of 32"):
        boundary.describe(torch.zeros(1, 3, 4, 4, 16, dtype=BF16))
    with pytest.raises(UserError, match="whole words"):
        boundary.describe(torch.zeros(200, dtype=BF16)[1:193].view(1, 3, 2, 1, 32))
