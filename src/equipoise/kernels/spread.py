"""The dense weight of a layer from its active values, with threads and without indices of 64 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import boundary, library

FEW = 1 << 16  # elements of a weight up to which autograd in C++ is faster than the kernel called from Python


def for_spread(index: Tensor, size: int) -> Tensor:
    """Return the indices in the type in which `spread` takes them fastest for a weight of `size` elements."""
    return index.long() if size <= FEW else index


def spread(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return a vector of `size` elements that has `values` at the ascending indices `index` and is zero elsewhere.

    It is differentiable any number of times with respect to `values`.
    """
    if index.numel() == size:  # ascending indices of all elements
        return values.view(size)
    if index.dtype is torch.int64:
        return values.new_zeros(size).index_copy_(0, index, values)
    return _Spread.apply(values, index, size)


def _with_kernel(tensor: Tensor, index: Tensor) -> bool:
    """Whether the kernel can compute with a tensor; torch's own operations take all others."""
    plain = type(index) is Tensor and tensor.dtype is torch.float32 and tensor.is_cpu and index.dtype is torch.int32
    return plain and library.available() and not torch.compiler.is_compiling()


def _spread(values: Tensor, index: Tensor, size: int) -> Tensor:
    if not _with_kernel(values, index):
        return values.new_zeros(size).scatter_(0, index.long(), values)
    dense, values = values.new_empty(size), values.resolve_neg().contiguous()
    _call("eq_spread", index.contiguous(), values, dense)
    return dense


def _gather(dense: Tensor, index: Tensor) -> Tensor:
    if not _with_kernel(dense, index):
        return dense.index_select(0, index)
    values, dense = dense.new_empty(index.numel()), dense.resolve_neg().contiguous()
    _call("eq_gather", index.contiguous(), dense, values)
    return values


def _call(name: str, index: Tensor, source: Tensor, target: Tensor) -> None:
    count, size = index.numel(), max(source.numel(), target.numel())
    lengths = (count, size) if name == "eq_spread" else (size, count)
    wrong = getattr(library.load(), name)(
        count,
        boundary.address(index, count, "index", torch.int32),
        boundary.address(source, lengths[0], "values"),
        size,
        boundary.address(target, lengths[1], "weight"),
        library.threads(),
    )
    if wrong:
        raise UserError(f"index must be ascending, and below the {size} elements of the weight")


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = size
        return _spread(values, index, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        values = _Gather.apply(grad, index) if torch.is_grad_enabled() else _gather(grad, index)
        return values, None, None


class _Gather(torch.autograd.Function):
    """The derivative of `_Spread`, and the reverse."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = dense.numel()
        return _gather(dense, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _Spread.apply(grad, index, ctx.size), None
