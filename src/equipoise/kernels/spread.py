"""The dense weight of a layer from its active values, with threads and without indices of 64 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import arena, boundary, library
from equipoise.kernels.library import LANES

FEW = 1 << 16  # elements of a weight up to which autograd in C++ is faster than the kernel called from Python


def for_spread(index: Tensor, size: int) -> Tensor:
    """Return the indices in the type in which `spread` takes them fastest for a weight of `size` elements."""
    return index.long() if size <= FEW else index


def spread(values: Tensor, index: Tensor, shape: Sequence[int], channels_last: bool = False) -> Tensor:
    """Return a tensor that has `values` at the ascending flat indices `index` and is zero elsewhere.

    It is differentiable any number of times with respect to `values`.

    Args:
        values: Its active elements.
        index: Their indices in contiguous order, as `for_spread` returns them.
        shape: Its shape.
        channels_last: Whether memory in that order is preferred; the shape has four dimensions then.
    """
    size = math.prod(shape)
    if index.numel() == size and not (channels_last and index.dtype is torch.int32):  # ascending indices of all
        return values.view(shape)
    if index.dtype is torch.int64:
        return spread_by_torch(values, index, shape)
    return _Spread.apply(values, index, shape, channels_last)


def spread_by_torch(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what `spread` returns, by operations that compilers know, for any number of values."""
    return values.new_zeros(math.prod(shape)).index_copy_(0, index.long(), values).view(shape)


def _with_kernel(tensor: Tensor, index: Tensor) -> bool:
    """Whether the kernel can compute with a tensor; torch's own operations take all others."""
    plain = type(index) is Tensor and tensor.dtype is torch.float32 and tensor.is_cpu and index.dtype is torch.int32
    return plain and library.available()


def _spread(values: Tensor, index: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    if not _with_kernel(values, index):
        return spread_by_torch(values, index, shape)
    dense = _empty(shape, channels_last)
    _call("eq_spread", index.contiguous(), values.resolve_neg().contiguous(), dense)
    return dense


def _empty(shape: Sequence[int], channels_last: bool = False) -> Tensor:
    """Lend memory, which the C library would map again at every step."""
    size = math.prod(shape)
    memory = arena.take((1, -(-size // LANES), 1, 1)).view(-1)[:size]
    if not channels_last:
        return memory.view(shape)
    outputs, channels, height, width = shape
    return memory.view(outputs, height, width, channels).permute(0, 3, 1, 2)


def _gather(dense: Tensor, index: Tensor) -> Tensor:
    if not _with_kernel(dense, index):
        return dense.reshape(-1).index_select(0, index)
    values, dense = _empty((index.numel(),)), dense.resolve_neg()
    _call("eq_gather", index.contiguous(), values, dense if is_channels_last(dense) else dense.contiguous())
    return values


def is_channels_last(dense: Tensor) -> bool:
    """Return whether memory is in channels_last order and not in the usual one; some tensors are in both."""
    return dense.dim() == 4 and not dense.is_contiguous() and dense.is_contiguous(memory_format=torch.channels_last)


def _call(name: str, index: Tensor, values: Tensor, dense: Tensor) -> None:
    count, size, row, taps = index.numel(), dense.numel(), 1, 1
    if is_channels_last(dense):
        row, taps = math.prod(dense.shape[1:]), math.prod(dense.shape[2:])
        dense = dense.permute(0, 2, 3, 1)
    wrong = getattr(library.load(), name)(
        count,
        boundary.address(index, count, "index", torch.int32),
        boundary.address(values, count, "values"),
        size,
        boundary.address(dense, size, "weight"),
        row,
        taps,
        library.threads(),
    )
    if wrong:
        raise UserError(f"index must be ascending, and below the {size} elements of the weight")


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
        ctx.save_for_backward(index)
        return _spread(values, index, shape, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        values = _Gather.apply(grad, index) if torch.is_grad_enabled() else _gather(grad, index)
        return values, None, None, None


class _Gather(torch.autograd.Function):
    """The derivative of `_Spread`, and the reverse."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = dense.shape
        return _gather(dense, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _Spread.apply(grad, index, ctx.shape, False), None
