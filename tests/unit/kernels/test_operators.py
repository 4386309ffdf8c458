"""The CPU kernels against dense PyTorch in float64."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from equipoise.errors import UserError
from equipoise.kernels import library, operators
from equipoise.kernels.arena import Border
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.operators import BATCH, FIXED, IDENTITY, Fused
from equipoise.kernels.taps import Pattern

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())

small = st.integers(1, 3)
borders = st.tuples(st.integers(0, 2), st.integers(0, 2))


@dataclass
class Case:
    """A random convolution."""

    shape: ConvShape
    size: tuple[int, int]
    images: int
    density: float
    seed: int


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    pair = st.tuples(small, small)
    shape = ConvShape(
        groups * draw(st.integers(1, 20)),
        groups * draw(st.integers(1, 20)),
        draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        draw(pair),
        draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        draw(pair),
        groups,
    )
    size = draw(st.tuples(st.integers(1, 11), st.integers(1, 11)))
    axes = zip(size, shape.kernel, shape.padding, shape.dilation, strict=True)
    assume(all(s + 2 * p > d * (k - 1) for s, k, p, d in axes))
    images = draw(st.integers(1, 40))
    return Case(shape, size, images, draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])), draw(st.integers(0, 999)))


def random_layer(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, sparse weight, bias in float64, and the active flat indices."""
    torch.manual_seed(case.seed)
    shape = case.shape
    weight = torch.randn(shape.out_channels, shape.in_channels // shape.groups, *shape.kernel, dtype=torch.float64)
    mask = torch.rand_like(weight) < case.density
    x = torch.randn(case.images, shape.in_channels, *case.size, dtype=torch.float64)
    bias = torch.randn(shape.out_channels, dtype=torch.float64)
    return x, weight * mask, bias, mask.flatten().nonzero().flatten()


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def assert_close(mine: Tensor, exact: Tensor, terms: int) -> None:
    """float32 error of a sum of `terms` products of standard normal numbers, with room."""
    assert mine.shape == exact.shape
    torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5 * (1 + terms) ** 0.5)


@settings(max_examples=150, deadline=None)
@given(convolutions(), borders, borders, st.booleans())
def test_convolution_and_its_gradients(case: Case, before: Border, after: Border, biased: bool) -> None:
    shape = case.shape
    x, weight, bias, index = random_layer(case)
    xd, wd, bd = leaf(x), leaf(weight), leaf(bias)
    exact = F.conv2d(xd, wd, bd if biased else None, shape.stride, shape.padding, shape.dilation, shape.groups)
    dy = torch.randn_like(exact)
    exact.backward(dy)

    xs, values, bs = leaf(x.float()), leaf(weight.flatten()[index].float()), leaf(bias.float())
    blocked = operators.conv(to_blocked(xs, before), values, bs if biased else None, Pattern(shape, index), after)
    mine = from_blocked(blocked)
    mine.backward(dy.float())

    taps = weight[0].numel()
    positions = case.images * exact.shape[2] * exact.shape[3]
    assert_close(mine, exact, taps)
    assert xs.grad is not None
    assert xd.grad is not None
    assert_close(xs.grad, xd.grad, taps * shape.out_channels)
    assert values.grad is not None
    assert wd.grad is not None
    assert_close(values.grad, wd.grad.flatten()[index], positions)
    if biased:
        assert bs.grad is not None
        assert bd.grad is not None
        assert_close(bs.grad, bd.grad, positions)


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(2, 7), st.integers(2, 7)),
    st.sampled_from([IDENTITY, FIXED, BATCH]),
    st.booleans(),
    st.sampled_from(["nothing", "pool", "residual"]),
    st.booleans(),
    borders,
    st.integers(0, 999),
)
def test_fused_norm_relu_pool(
    shape: tuple[int, ...], norm: int, relu: bool, extra: str, scaled: bool, border: Border, seed: int
) -> None:
    torch.manual_seed(seed)
    x = 2 * torch.randn(shape, dtype=torch.float64) + 5
    gamma, beta, running_mean = torch.randn(3, shape[1], dtype=torch.float64)
    running_var = torch.rand(shape[1], dtype=torch.float64) + 0.1
    residual = torch.randn(shape, dtype=torch.float64)
    mine_running = (running_mean.float().clone(), running_var.float().clone())
    exact_in = [leaf(t) for t in (x, gamma, beta, residual)]
    mine_in = [leaf(t.float()) for t in (x, gamma, beta, residual)]

    xd, gd, bd, rd = exact_in
    exact = xd
    affine = (gd, bd) if scaled else (None, None)
    if norm:
        exact = F.batch_norm(xd, running_mean, running_var, affine[0], affine[1], norm == BATCH, 0.1, 1e-5)
    exact = exact + rd if extra == "residual" else exact
    exact = exact.relu() if relu else exact
    exact = F.max_pool2d(exact, 2) if extra == "pool" else exact
    dy = torch.randn_like(exact)
    exact.backward(dy)

    xs, gs, bs, rs = mine_in
    how = Fused(norm, relu, extra == "pool", 1e-5, 0.1, border)
    other = to_blocked(rs) if extra == "residual" else None
    parameters = (gs, bs) if scaled and norm else (None, None)
    running = mine_running if norm else None
    mine = from_blocked(operators.fused(to_blocked(xs), how, parameters[0], parameters[1], running, other))
    mine.backward(dy.float())

    # A value within rounding of a kink may fall on its other side: allow a few such values.
    def mostly_close(a: Tensor, b: Tensor, scale: float) -> None:
        far = (a.double() - b).abs() > 1e-3 * scale
        assert far.sum() <= 0.01 * far.numel()

    torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)
    assert xs.grad is not None
    assert xd.grad is not None
    mostly_close(xs.grad, xd.grad, 1 + float(xd.grad.abs().max()))
    if norm:
        torch.testing.assert_close(mine_running[0].double(), running_mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine_running[1].double(), running_var, rtol=1e-4, atol=1e-5)
    if norm and scaled:
        for a, b in ((gs, gd), (bs, bd)):
            assert a.grad is not None
            assert b.grad is not None
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-2)
    if extra == "residual":
        assert rs.grad is not None
        assert rd.grad is not None
        mostly_close(rs.grad, rd.grad, 1.0)


def test_variance_does_not_cancel() -> None:
    """With values far from zero and a small spread, squares in float32 would lose all digits."""
    torch.manual_seed(0)
    x = 1e4 + torch.randn(32, 3, 8, 8, dtype=torch.float64)
    x = x.float().double()
    exact = F.batch_norm(x, None, None, None, None, True)
    mine = from_blocked(operators.fused(to_blocked(x.float()), Fused(BATCH)))
    torch.testing.assert_close(mine.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_activation_stays_visible(value: float) -> None:
    x = torch.ones(2, 1, 4, 4)
    x[0, 0, 1, 1] = value
    pooled = from_blocked(operators.max_pool(to_blocked(x), relu=True))
    assert torch.equal(pooled.isfinite(), F.max_pool2d(x.relu(), 2).isfinite())
    pattern = Pattern(ConvShape(1, 1), torch.zeros(1, dtype=torch.int64))
    out = from_blocked(operators.conv(to_blocked(x), torch.ones(1), None, pattern))
    assert torch.equal(out.isfinite(), x.isfinite())


@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([(4, 6), (5, 5), (1, 7)]),
    st.sampled_from([None, (2, 2), (1, 3)]),
)
@settings(max_examples=30, deadline=None)
def test_average_pool_and_flatten(
    images: int, channels: int, size: tuple[int, int], kernel: tuple[int, int] | None
) -> None:
    kernel = kernel if kernel is None or (size[0] >= kernel[0] and size[1] >= kernel[1]) else None
    x, xs = (leaf(torch.randn(images, channels, *size)) for _ in range(2))
    xs = leaf(x)
    exact = (F.avg_pool2d(x, kernel) if kernel else x.mean((2, 3), keepdim=True)).flatten(1)
    mine = from_blocked(operators.flatten(operators.avg_pool(to_blocked(xs, (1, 1)), kernel)))
    weight = torch.randn_like(exact)
    (exact * weight).sum().backward()
    (mine * weight).sum().backward()
    torch.testing.assert_close(mine, exact)
    assert xs.grad is not None
    torch.testing.assert_close(xs.grad, x.grad)


@given(st.integers(1, 40), st.sampled_from([(3,), (2, 5), (3, 4, 6)]), borders, st.booleans())
@settings(max_examples=40, deadline=None)
def test_layout_round_trip(images: int, shape: tuple[int, ...], border: Border, flipped: bool) -> None:
    x = torch.randn(images, *shape)
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if flipped else x
    blocked = to_blocked(x, border)
    assert torch.equal(from_blocked(blocked), x)
    padding = blocked.data.permute(0, 4, 1, 2, 3).flatten(0, 1)[images:]
    assert not padding.any()


def step(images: int = 33) -> list[Tensor]:
    """A small network forward and backward."""
    torch.manual_seed(0)
    shape = ConvShape(24, 20, (3, 3), (1, 1), (1, 1))
    index = (torch.rand(shape.weight_numel) < 0.1).nonzero().flatten()
    x, values = leaf(torch.randn(images, 20, 9, 9)), leaf(torch.randn(index.numel()))
    y = operators.conv(to_blocked(x, (1, 1)), values, None, Pattern(shape, index))
    out = from_blocked(operators.fused(y, Fused(BATCH, relu=True, pool=True)))
    out.square().sum().backward()
    assert x.grad is not None
    assert values.grad is not None
    return [out.detach(), x.grad, values.grad]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_every_time_at_a_number_of_threads_and_nearly_so_at_any(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = step()
        torch.set_num_threads(threads)
        reference = step()
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(step(), reference, strict=True))
        for one, other in zip(alone, reference, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def answer_of_child(work: Callable[[], float]) -> float:
    """The result of `work` in a forked process; fails if that process hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(work()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        ready, _, _ = select.select([answer], [], [], 30)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert ready, "the forked child hangs"
        return float(answer.read())


def test_a_forked_child_still_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader workers fork after the pool of threads has started; its threads do not exist in the child."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = float(step()[0].sum())
        torch.set_num_threads(1)  # torch's operations would hang in the child
        monkeypatch.setattr(library, "threads", lambda: 2)
        assert answer_of_child(lambda: float(step()[0].sum())) == expected
    finally:
        torch.set_num_threads(before)


class Computing(Dataset[Tensor]):
    """A dataset whose items are computed by the kernels."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> Tensor:
        return step(images=16 + item)[0].sum()


def test_dataloader_workers_may_use_the_kernels() -> None:
    expected = [Computing()[i] for i in range(4)]
    loader = DataLoader(Computing(), batch_size=None, num_workers=2, timeout=60, multiprocessing_context="fork")
    assert [float(x) for x in loader] == [float(x) for x in expected]


@pytest.mark.parametrize("x", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2), torch.zeros(1, 2, 3, 4, 5)])
def test_other_types_and_dimensions_are_refused(x: Tensor) -> None:
    with pytest.raises(UserError, match="packed layers"):
        to_blocked(x)


def test_wrong_channels_and_too_small_maps_are_refused() -> None:
    pattern = Pattern(ConvShape(4, 3, (3, 3)), torch.arange(5))
    with pytest.raises(UserError, match="3 channels"):
        operators.conv(to_blocked(torch.zeros(1, 2, 5, 5)), torch.ones(5), None, pattern)
    with pytest.raises(UserError, match="too small"):
        operators.conv(to_blocked(torch.zeros(1, 3, 2, 2)), torch.ones(5), None, pattern)


def test_pooling_is_along_the_axes_of_torch_or_refused() -> None:
    x = to_blocked(torch.rand(2, 3, 8))
    for wrong in (operators.max_pool, operators.avg_pool):
        with pytest.raises(UserError, match="4 dimensions"):
            wrong(x)
    with pytest.raises(UserError, match="too small"):
        operators.max_pool(to_blocked(torch.rand(2, 3, 1, 8)))
    with pytest.raises(UserError, match="too small"):
        operators.avg_pool(to_blocked(torch.rand(2, 3, 8, 2)), (3, 3))


def test_a_residual_of_other_images_is_refused() -> None:
    with pytest.raises(UserError, match="residual"):
        operators.add(to_blocked(torch.rand(2, 3, 4, 4)), to_blocked(torch.rand(3, 3, 4, 4)))
