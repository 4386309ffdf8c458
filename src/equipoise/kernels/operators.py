"""Differentiable operations on blocked activations: convolution, normalisation, ReLU, pooling, addition."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight

from equipoise.errors import UserError
from equipoise.kernels import arena, block_conv, boundary, library
from equipoise.kernels.blocked import Blocked, unblock
from equipoise.kernels.geometry import NO_BORDER, Border, ConvShape, check_pool
from equipoise.kernels.library import LANES, Map, Norm
from equipoise.kernels.taps import Pattern, Taps

IDENTITY, FIXED, BATCH = range(3)
FEW_WEIGHTS = 64  # of an input channel; with more, blocks of 16 outputs gain more in passes of their own
MAPS = frozenset(field[0] for field in Norm._fields_ if field[1] is Map)


def conv(
    x: Blocked,
    values: Tensor,
    bias: Tensor | None,
    pattern: Pattern,
    border: Border = NO_BORDER,
    probe: Tensor | None = None,
) -> Blocked:
    """Convolve with the active weights only.

    Args:
        x: The input.
        values: Active weights, in the order of `pattern`.
        bias: One value per output channel, or `None`.
        pattern: Indices of the active weights, and the shape of the convolution.
        border: Zeros to put around the result, for the layer that reads it.
        probe: A tensor in the shape of the dense weight; its gradient is that of all weights, active or not.
    """
    size = (x.data.shape[2], x.data.shape[3])
    y = _Conv.apply(x.data, values, bias, probe, pattern, border, x.grad_border, x.images)
    return x.with_data(y, pattern.shape.grad_border(size))


def input_grad(dy: Tensor, values: Tensor, pattern: Pattern, size: torch.Size, border: Border) -> Tensor:
    """Return the gradient of the input of a blocked convolution.

    The forward kernel runs on the transposed pattern, once for each phase of the stride.
    """
    shape = pattern.shape
    if pattern.blocks is not None:
        dx = arena.take((size[0], size[1], size[2], size[3]), border, dy.dtype)
        block_conv.input_grad(arena.with_border(dy, NO_BORDER), dx, values, pattern.blocks)
        return dx
    dx = arena.take((size[0], size[1], size[2], size[3]), border, dy.dtype)
    dy = arena.with_border(dy, shape.grad_border((size[2], size[3])))
    with pattern.lend(transposed=True) as taps:
        taps.load(values, *boundary.plane_steps(dy))
        for phase in range(taps.sorted.phases):
            row, column = divmod(phase, shape.stride[1])
            target = dx[:, :, row :: shape.stride[0], column :: shape.stride[1]]
            if target.numel():
                _run_conv(dy, target, (1, 1), taps, phase=phase, column_step=shape.stride[1] * LANES)
    return dx


def _run_conv(
    x: Tensor,
    y: Tensor,
    stride: tuple[int, int],
    taps: Taps,
    bias: Tensor | None = None,
    phase: int = 0,
    column_step: int = LANES,
) -> None:
    library.load().eq_conv(
        byref(boundary.describe_source(x, y.shape, stride, taps.reach[phase])),
        byref(boundary.describe(y, column_step=column_step)),
        taps.address,
        taps.sorted.start_at(phase),
        taps.sorted.blocks,
        taps.reach_in_plane,
        boundary.address(bias, y.shape[1], "bias"),
        0,  # no ReLU
        boundary.is_half(x, y),
        library.threads(),
    )


def weight_grad(x: Tensor, dy: Tensor, pattern: Pattern, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the active weights and of the bias of a blocked convolution."""
    dy = arena.with_border(dy, NO_BORDER)
    count, channels = pattern.index.numel(), pattern.shape.out_channels
    dvalues = torch.empty(count)
    dbias = torch.empty(channels) if bias else None
    if pattern.blocks is not None:
        return block_conv.weight_grad(x, dy, dbias, pattern.blocks), dbias
    with pattern.lend() as taps:
        taps.set_steps(*boundary.plane_steps(x))
        library.load().eq_conv_grad(
            byref(boundary.describe_source(x, dy.shape, pattern.shape.stride, taps.reach[0])),
            byref(boundary.describe(dy)),
            taps.address,
            taps.sorted.start_at(),
            taps.sorted.order_at,
            taps.sorted.blocks,
            taps.reach_in_plane,
            boundary.address(dvalues, count, "gradient of the weights"),
            boundary.address(dbias, channels, "gradient of the bias"),
            boundary.is_half(x, dy),
            library.threads(),
        )
    return dvalues, dbias


def _in_one_pass(pattern: Pattern) -> bool:
    """Whether one pass over the gradient of the output is faster than one for each result, with bf16 maps."""
    if pattern.shape.stride != (1, 1) or not library.has_bf16():
        return False
    return pattern.blocks is None or pattern.index.numel() < FEW_WEIGHTS * pattern.shape.in_channels


def both_grads(
    x: Tensor, dy: Tensor, values: Tensor, pattern: Pattern, bias: bool, border: Border
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the input, of the active weights and of the bias of a blocked convolution.

    Args:
        x: The input.
        dy: The gradient of the output.
        values: Active weights.
        pattern: Their pattern.
        bias: Whether there is a bias.
        border: Zeros to put around the gradient of the input.
    """
    shape = pattern.shape
    if not boundary.is_half(x, dy) or not _in_one_pass(pattern):
        return input_grad(dy, values, pattern, x.shape, border), *weight_grad(x, dy, pattern, bias)
    dx = arena.take((x.shape[0], x.shape[1], x.shape[2], x.shape[3]), border, dy.dtype)
    dy = arena.with_border(dy, shape.grad_border((x.shape[2], x.shape[3])))
    dvalues = torch.empty(values.numel())
    dbias = torch.empty(shape.out_channels) if bias else None
    with pattern.lend(transposed=True) as taps:
        taps.load(values, *boundary.plane_steps(dy))
        library.load().eq_conv_back(
            byref(boundary.describe(x)),
            byref(boundary.describe_source(dy, dx.shape, shape.stride, taps.reach[0])),
            byref(boundary.describe(dx)),
            taps.address,
            taps.sorted.start_at(),
            taps.sorted.order_at,
            taps.sorted.blocks,
            taps.reach_in_plane,
            boundary.address(dvalues, taps.sorted.count, "gradient of the weights"),
            boundary.address(dbias, shape.out_channels, "gradient of the bias"),
            library.threads(),
        )
    return dx, dvalues, dbias


def dense_weight_grad(x: Tensor, dy: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient of active and inactive weights, of plain images, by torch."""
    size = (shape.out_channels, shape.in_channels // shape.groups, *shape.kernel)
    return conv2d_weight(x, size, dy, shape.stride, shape.padding, shape.dilation, shape.groups)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        probe: Tensor | None,
        pattern: Pattern,
        border: Border,
        grad_border: Border,
        images: int,
    ) -> Tensor:
        shape = pattern.shape
        shape.check_channels(x.shape[1])
        x = arena.with_border(x, shape.padding)
        y = arena.take((x.shape[0], shape.out_channels, *shape.output((x.shape[2], x.shape[3]))), border, x.dtype)
        vector = boundary.as_vector(bias, shape.out_channels, "bias")
        if pattern.blocks is not None:
            block_conv.forward(x, y, values, vector, pattern.blocks)
        else:
            with pattern.lend() as taps:
                taps.load(values, *boundary.plane_steps(x))
                _run_conv(x, y, shape.stride, taps, vector)
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.has_bias, ctx.grad_border, ctx.images = pattern, bias is not None, grad_border, images
        ctx.probe_shape = None if probe is None else probe.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, values = ctx.saved_tensors
        dx = dvalues = dbias = dprobe = None
        of_weights = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if ctx.needs_input_grad[0] and of_weights:
            dx, dvalues, dbias = both_grads(x, dy, values, ctx.pattern, ctx.has_bias, ctx.grad_border)
        elif ctx.needs_input_grad[0]:
            dx = input_grad(dy, values, ctx.pattern, x.shape, ctx.grad_border)
        elif of_weights:
            dvalues, dbias = weight_grad(x, dy, ctx.pattern, ctx.has_bias)
        if ctx.needs_input_grad[3]:
            dprobe = dense_weight_grad(unblock(x, ctx.images), unblock(dy, ctx.images), ctx.pattern.shape).view(
                ctx.probe_shape
            )
        return dx, dvalues, dbias, dprobe, None, None, None, None


@dataclass(frozen=True)
class Fused:
    """Operations that one pass over an activation does, in this order: normalise, add a residual, ReLU, max-pool.

    Args:
        norm: `IDENTITY` (none), `FIXED` (by running statistics) or `BATCH` (by statistics of the batch).
        relu: Whether to apply ReLU.
        pool: Whether to take the maximum over 2x2 windows with stride 2.
        eps: Added to the variance.
        momentum: Weight of this batch in the running statistics.
        border: Zeros to put around the result.
    """

    norm: int = IDENTITY
    relu: bool = False
    pool: bool = False
    eps: float = 1e-5
    momentum: float = 0.0
    border: Border = NO_BORDER


def fused(
    x: Blocked,
    how: Fused,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    residual: Blocked | None = None,
) -> Blocked:
    """Apply BatchNorm, residual addition, ReLU and 2x2 max-pool in one pass.

    Args:
        x: The input.
        how: Which operations to apply. A residual and max-pool exclude each other.
        gamma: Scale of the norm, per channel.
        beta: Shift of the norm, per channel.
        running: Running mean and variance; updated in place if `how.norm` is `BATCH`.
        residual: Added before ReLU; of the shape of `x`.

    Raises:
        UserError: If the shapes do not fit.
    """
    if residual is not None and (
        how.pool or residual.plain_shape != x.plain_shape or residual.data.shape != x.data.shape
    ):
        raise UserError(
            f"a residual must have the shape of the input it is added to, {x.plain_shape}, not {residual.plain_shape}"
        )
    if how.pool:
        check_pool(x.dims, (x.data.shape[2], x.data.shape[3]), (2, 2))
    if how.norm == FIXED and running is None:
        raise UserError("a norm by running statistics needs a running mean and variance")
    if how.norm == BATCH and x.images * x.data.shape[2] * x.data.shape[3] < 2:
        raise UserError("BatchNorm in train mode needs more than one value per channel")
    other = None if residual is None else residual.data
    other_border = NO_BORDER if residual is None else residual.grad_border
    out = _Fused.apply(x.data, other, gamma, beta, how, running, x.images, x.grad_border, other_border)
    return x.with_data(out)


def _norm_arguments(how: Fused, images: int, channels: int, tensors: dict[str, Tensor | None]) -> Norm:
    half = boundary.is_half(*(tensor for name, tensor in tensors.items() if name in MAPS and tensor is not None))
    described = {
        name: boundary.describe(tensor) if name in MAPS else boundary.address(tensor, channels, name)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    return Norm(
        images=images, norm=how.norm, relu=how.relu, pool=how.pool, half=half, eps=how.eps, momentum=how.momentum,
        **described,
    )  # fmt: skip


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        how: Fused,
        running: tuple[Tensor, Tensor] | None,
        images: int,
        grad_border: Border,
        residual_border: Border,
    ) -> Tensor:
        x = arena.with_border(x, NO_BORDER)
        if residual is not None:
            residual = arena.with_border(residual, NO_BORDER)
        blocks, channels, height, width, _ = x.shape
        size = (height // 2, width // 2) if how.pool else (height, width)
        out = arena.take((blocks, channels, *size), how.border, x.dtype)
        mean, inv = torch.empty(2, channels)
        gamma = boundary.as_vector(gamma, channels, "weight of the norm")
        beta = boundary.as_vector(beta, channels, "bias of the norm")
        statistics = [
            boundary.as_vector(tensor, channels, "running statistics") for tensor in running or (None, None)
        ]
        tensors = {
            "y": x, "out": out, "residual": residual, "gamma": gamma, "beta": beta,
            "running_mean": statistics[0], "running_var": statistics[1], "mean": mean, "inv": inv,
        }  # fmt: skip
        arguments = _norm_arguments(how, images, channels, tensors)
        library.load().eq_norm(byref(arguments), library.threads())
        if running is not None and how.norm == BATCH:
            for tensor, updated in zip(running, statistics, strict=True):
                if updated is not None and updated is not tensor:
                    tensor.copy_(updated)
        ctx.save_for_backward(x, residual, gamma, beta, mean, inv)
        ctx.how, ctx.images, ctx.borders = how, images, (grad_border, residual_border)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, residual, gamma, beta, mean, inv = ctx.saved_tensors
        grad = arena.with_border(grad, NO_BORDER)
        shape = (x.shape[0], x.shape[1], x.shape[2], x.shape[3])
        dx = arena.take(shape, ctx.borders[0], x.dtype)
        dresidual = None if residual is None else arena.take(shape, ctx.borders[1], x.dtype)
        dgamma = None if gamma is None else torch.empty(shape[1])
        dbeta = None if beta is None else torch.empty(shape[1])
        tensors = {
            "y": x, "residual": residual, "gamma": gamma, "beta": beta, "mean": mean, "inv": inv,
            "dy": dx, "dresidual": dresidual, "dout": grad, "dgamma": dgamma, "dbeta": dbeta,
        }  # fmt: skip
        arguments = _norm_arguments(ctx.how, ctx.images, shape[1], tensors)
        library.load().eq_norm_grad(byref(arguments), library.threads())
        return dx, dresidual, dgamma, dbeta, None, None, None, None, None


def relu(x: Blocked, border: Border = NO_BORDER) -> Blocked:
    """ReLU."""
    return fused(x, Fused(relu=True, border=border))


def max_pool(x: Blocked, border: Border = NO_BORDER, relu: bool = False) -> Blocked:
    """Max-pool over 2x2 windows with stride 2, after ReLU if `relu` is set."""
    return fused(x, Fused(pool=True, relu=relu, border=border))


def add(x: Blocked, other: Blocked, border: Border = NO_BORDER, relu: bool = False) -> Blocked:
    """Sum of two activations, with ReLU after it if `relu` is set."""
    return fused(x, Fused(relu=relu, border=border), residual=other)


def avg_pool(x: Blocked, kernel: tuple[int, int] | None = None) -> Blocked:
    """Mean over windows of size and stride `kernel`; over the whole plane by default."""
    check_pool(x.dims, (x.data.shape[2], x.data.shape[3]), kernel or (1, 1))
    if kernel is None:
        return x.with_data(x.data.mean((2, 3), keepdim=True))
    height, width = (x.data.shape[2] // kernel[0], x.data.shape[3] // kernel[1])
    data = x.data[:, :, : height * kernel[0], : width * kernel[1]]
    return x.with_data(data.unflatten(3, (width, kernel[1])).unflatten(2, (height, kernel[0])).mean((3, 5)))


def flatten(x: Blocked) -> Blocked:
    """Flatten all dimensions but the batch, in torch's order."""
    blocks, channels, height, width, lanes = x.data.shape
    return Blocked(x.data.reshape(blocks, channels * height * width, 1, 1, lanes), x.images, dims=2)
