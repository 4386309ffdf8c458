"""The dense weight of active values, and its gradients, against loops in Python."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import library, spread
from equipoise.kernels.spread import FEW, for_spread

SIZES = (0, 1, 7, 1024, 40_000, 3 * FEW)  # the kernel takes threads from 16384 elements on
needs_kernels = pytest.mark.skipif(not library.available(), reason=library.reason())


def indices(size: int, density: float) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.rand(size, generator=generator) < density).nonzero().flatten().to(torch.int32)


def by_loop(values: Tensor, index: Tensor, size: int) -> list[float]:
    dense = [0.0] * size
    for i, value in zip(index.tolist(), values.tolist(), strict=True):
        dense[i] = value
    return dense


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_a_loop(size: int, density: float, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        index = indices(size, density)
        for chosen in (index, for_spread(index, size)):
            values = torch.randn(index.numel(), requires_grad=True)
            dense = spread.spread(values, chosen, (size,))
            assert dense.tolist() == by_loop(values.detach(), index, size)
            grad = torch.randn(size)
            (found,) = torch.autograd.grad(dense, values, grad)
            listed = grad.tolist()
            assert found.tolist() == [listed[i] for i in index.tolist()]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(7, 3, 3, 3), (64, 128, 3, 3), (130, 64, 5, 5), (40, 1, 3, 3), (300, 300, 1, 1)])
def test_a_weight_in_channels_last_order_is_the_same(
    shape: tuple[int, int, int, int], density: float, threads: int
) -> None:
    size = math.prod(shape)
    index = indices(size, density)
    values = torch.randn(index.numel(), requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        dense = spread.spread(values, index, shape, channels_last=True)
        assert dense.is_contiguous(memory_format=torch.channels_last) or not library.available()
        assert dense.flatten().tolist() == by_loop(values.detach(), index, size)
        grad = torch.randn(shape)
        listed = grad.flatten().tolist()
        for gradient in (
            grad,
            grad.to(memory_format=torch.channels_last),
            grad.transpose(0, 3).clone().transpose(0, 3),
        ):
            (found,) = torch.autograd.grad(dense, values, gradient, retain_graph=True)
            assert found.tolist() == [listed[i] for i in index.tolist()]
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("change", [(0, -1), (5000, -3), (5000, 0), (-1, 40_000), (-1, 2**31 - 1), (9_999, 2**30)])
def test_wrong_indices_are_refused_in_channels_last_order_too(change: tuple[int, int]) -> None:
    index = torch.arange(0, 40_000, 2, dtype=torch.int32)
    index[change[0]] = change[1]
    weight = torch.zeros(40, 5, 5, 40).permute(0, 3, 1, 2)
    with pytest.raises(UserError, match="ascending, and below the 40000"):
        spread._call("eq_spread", index, torch.ones(20_000), weight)
    with pytest.raises(UserError, match="ascending, and below the 40000"):
        spread._gather(weight, index)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "change", [(0, -1), (0, -(2**31)), (5000, -3), (5000, 0), (-1, 40_000), (-1, 2**31 - 1), (9_999, 2**30)]
)
def test_indices_that_changed_unnoticed_are_refused(change: tuple[int, int], threads: int) -> None:
    """The index of a layer is checked once; a write that autograd does not count must not write outside the weight."""
    index = torch.arange(0, 40_000, 2, dtype=torch.int32)
    index[change[0]] = change[1]
    guarded = torch.full((3 * 40_000,), 7.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(UserError, match="ascending, and below the 40000"):
            spread._call("eq_spread", index, torch.ones(20_000), guarded[40_000:80_000])
    finally:
        torch.set_num_threads(before)
    assert bool((guarded[:40_000] == 7).all())
    assert bool((guarded[80_000:] == 7).all())


@needs_kernels
@pytest.mark.parametrize("wrong", [-1, 40_000, -(2**31), 2**31 - 1])
def test_a_gradient_is_not_read_outside(wrong: int) -> None:
    index = torch.arange(40_000, dtype=torch.int32)[::2].contiguous()
    index[123] = wrong
    with pytest.raises(UserError, match="below the 40000"):
        spread._gather(torch.ones(40_000), index)


def test_second_derivatives_are_those_of_torch() -> None:
    size = 2 * FEW
    index = indices(size, 0.3)
    values = torch.randn(index.numel(), requires_grad=True)
    weights = torch.randn(size)
    (first,) = torch.autograd.grad(
        (spread.spread(values, index, (size,)) ** 3 * weights).sum(), values, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), values)
    torch.testing.assert_close(second, 6 * values.detach() * weights[index.long()])


def test_several_weights_of_one_vector_keep_their_numbers() -> None:
    """A weight that autograd saved is not overwritten by the next one, nor by a step."""
    size = 2 * FEW
    index = indices(size, 0.5)
    values = torch.randn(index.numel(), requires_grad=True)
    outs = [spread.spread(values, index, (size,)).square().sum() for _ in range(2)]
    expected = 4 * values.detach().clone()
    sum(outs).backward()
    with torch.no_grad():
        values.add_(1)
    torch.testing.assert_close(values.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype: torch.dtype) -> None:
    index = indices(2 * FEW, 0.5)
    values = torch.randn(index.numel(), dtype=dtype)
    assert spread.spread(values, index, (2 * FEW,)).tolist() == by_loop(values, index, 2 * FEW)
