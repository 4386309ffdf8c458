"""The batch-blocked layout: sixteen images side by side as the innermost axis of an activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equipoise.errors import UserError
from equipoise.kernels import arena
from equipoise.kernels import library as kernels
from equipoise.kernels.arena import NO_BORDER, Border
from equipoise.kernels.library import LANES, Map, byref

SHORTER = (torch.bfloat16, torch.float16)  # what autocast computes in


@dataclass(frozen=True, slots=True)
class Blocked:
    """An activation in the blocked layout, as it travels between the layers of a packed model."""

    data: Tensor  # (blocks, channels, height, width, lanes)
    images: int  # of the batch; the lanes beyond are padding
    dims: int = 4  # of the plain tensor: 4 images, 3 sequences, 2 vectors
    grad_border: Border = NO_BORDER  # border that the producer would like around its gradient

    def with_data(self, data: Tensor, grad_border: Border = NO_BORDER) -> Blocked:
        return Blocked(data, self.images, self.dims, grad_border)

    @property
    def plain_shape(self) -> tuple[int, ...]:
        _, channels, height, width, _ = self.data.shape
        return (self.images, channels, *{4: (height, width), 3: (width,), 2: ()}[self.dims])


def to_blocked(x: Tensor, border: Border = NO_BORDER) -> Blocked:
    """(images, channels[, height][, width]) in float32 on CPU to the blocked layout."""
    x = as_float32(x)
    if x.dim() not in (2, 3, 4):
        raise UserError(f"packed layers take batches of 2 to 4 dimensions, not {tuple(x.shape)}")
    return Blocked(_ToBlocked.apply(_as_images(x), border), x.shape[0], x.dim())


def as_float32(x: Tensor) -> Tensor:
    """`x`, which the kernels will read through a pointer: refused unless its bytes are what they expect.

    Under autocast what torch has made shorter is made float32 again, as before torch's own float32-only operations.
    """
    if x.dtype == torch.float32 and x.is_cpu:
        return x
    if x.dtype in SHORTER and x.is_cpu and torch.is_autocast_enabled("cpu"):
        return x.float()
    raise UserError(
        f"packed layers take float32 on cpu, not {x.dtype} on {x.device}; convert with .float() and .cpu()"
    )


def from_blocked(x: Blocked) -> Tensor:
    """Back to (images, channels[, height][, width]), contiguous."""
    return _FromBlocked.apply(x.data, x.images, x.grad_border).view(x.plain_shape)


def _as_images(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    return x.unsqueeze(2) if x.dim() == 3 else x[:, :, None, None]


def _plain_map(x: Tensor) -> Map:
    return Map(x.data_ptr(), *x.shape, *x.stride())


def _block(x: Tensor, border: Border) -> Tensor:
    images, channels, height, width = x.shape
    out = arena.take((-(-images // LANES), channels, height, width), border)
    kernels.library().eq_layout(byref(_plain_map(x)), byref(kernels.describe(out)), 1, kernels.threads())
    return out


def unblock(x: Tensor, images: int) -> Tensor:
    """The images of a blocked map, without a gradient."""
    x = arena.with_border(x, NO_BORDER)
    out = x.new_empty(images, *x.shape[1:4])
    kernels.library().eq_layout(byref(_plain_map(out)), byref(kernels.describe(x)), 0, kernels.threads())
    return out


class _ToBlocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, border: Border) -> Tensor:
        ctx.images = x.shape[0]
        return _block(x, border)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return unblock(grad, ctx.images), None


class _FromBlocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, images: int, grad_border: Border) -> Tensor:
        ctx.grad_border = grad_border
        return unblock(x, images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _block(grad, ctx.grad_border), None, None
