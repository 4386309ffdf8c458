"""The batch-blocked layout: images side by side are the innermost axis of an activation, 16 in float32, 32 in bf16."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equipoise.errors import UserError
from equipoise.kernels import arena, boundary, library
from equipoise.kernels.geometry import NO_BORDER, Border

AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Blocked:
    """An activation in the blocked layout, as it travels between the layers of a packed model.

    Args:
        data: Shape (blocks, channels, height, width, lanes); float32 with 16 lanes, or bfloat16 with 32.
        images: Images in the batch; further lanes are padding.
        dims: Dimensions of the plain tensor: 4 for images, 3 for sequences, 2 for vectors.
        grad_border: Zeros that the producer needs around the gradient of `data`.
    """

    data: Tensor
    images: int
    dims: int = 4
    grad_border: Border = NO_BORDER

    def __post_init__(self) -> None:
        if self.data.dim() != 5 or not 0 <= self.images <= self.data.shape[0] * self.data.shape[4]:
            raise UserError(f"{self.images} images do not fit a blocked activation of {list(self.data.shape)}")

    def with_data(self, data: Tensor, grad_border: Border = NO_BORDER) -> Blocked:
        """Another activation of the same batch."""
        return Blocked(data, self.images, self.dims, grad_border)

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape of the plain tensor."""
        _, channels, height, width, _ = self.data.shape
        return (self.images, channels, *{4: (height, width), 3: (width,), 2: ()}[self.dims])


def to_blocked(x: Tensor, border: Border = NO_BORDER, dtype: torch.dtype = torch.float32) -> Blocked:
    """Convert a batch to the blocked layout.

    Args:
        x: Shape (images, channels), (images, channels, width) or (images, channels, height, width), on the CPU.
        border: Zeros to put around each plane, for the convolution that reads the result.
        dtype: Type in which the activation is stored; bfloat16 numbers are rounded to the nearest, ties to even.

    Raises:
        UserError: If `x` is not float32 on the CPU or has another number of dimensions.
    """
    x = as_float32(x)
    if x.dim() not in (2, 3, 4):
        raise UserError(f"packed layers take batches of 2 to 4 dimensions, not {tuple(x.shape)}")
    return Blocked(_ToBlocked.apply(_as_images(x), border, dtype), x.shape[0], x.dim())


def as_float32(x: Tensor) -> Tensor:
    """Check that the kernels can read `x` through a pointer.

    Under autocast, half-precision tensors are cast to float32, as before torch's float32-only operations.

    Raises:
        UserError: If `x` is not float32 on the CPU.
    """
    if x.dtype == torch.float32 and x.is_cpu and x.layout is torch.strided:
        return x.resolve_neg()
    if x.dtype in AUTOCAST_DTYPES and x.is_cpu and torch.is_autocast_enabled("cpu"):
        return x.float()
    layout = "" if x.layout is torch.strided else f" ({x.layout})"
    raise UserError(
        f"packed layers take float32 on cpu, not {x.dtype} on {x.device}{layout}; convert with .float() and .cpu()"
    )


def from_blocked(x: Blocked) -> Tensor:
    """Convert an activation to a plain contiguous float32 tensor; the inverse of `to_blocked`."""
    return _FromBlocked.apply(x.data, x.images, x.grad_border).view(x.plain_shape)


def _as_images(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    return x.unsqueeze(2) if x.dim() == 3 else x[:, :, None, None]


def fill_blocked(blocked: Tensor, plain: Tensor) -> Tensor:
    """Copy plain images into a tensor in the blocked layout, without a gradient; zeros fill the other lanes."""
    _copy(plain, blocked, to_blocked=True)
    return blocked


def fill_plain(plain: Tensor, blocked: Tensor) -> Tensor:
    """Copy images out of the blocked layout into a plain tensor, without a gradient."""
    _copy(plain, blocked, to_blocked=False)
    return plain


def _copy(plain: Tensor, blocked: Tensor, to_blocked: bool) -> None:
    described, half = boundary.describe(blocked), boundary.is_half(blocked)
    images = boundary.describe_images(plain, blocked.shape)
    library.load().eq_layout(byref(images), byref(described), to_blocked, half, library.threads())


def _block(x: Tensor, border: Border, dtype: torch.dtype) -> Tensor:
    images, channels, height, width = x.shape
    blocks = -(-images // boundary.lanes(dtype))
    return fill_blocked(arena.take((blocks, channels, height, width), border, dtype), x)


def unblock(x: Tensor, images: int) -> Tensor:
    """Return the images of a blocked tensor in float32, without a gradient."""
    return fill_plain(torch.empty(images, *x.shape[1:4]), arena.with_border(x, NO_BORDER))


class _ToBlocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, border: Border, dtype: torch.dtype) -> Tensor:
        ctx.images = x.shape[0]
        return _block(x, border, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return unblock(grad, ctx.images), None, None


class _FromBlocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, images: int, grad_border: Border) -> Tensor:
        ctx.grad_border, ctx.dtype = grad_border, x.dtype
        return unblock(x, images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _block(grad, ctx.grad_border, ctx.dtype), None, None
