"""Sparse convolution of plain images, as PyTorch operators in the namespace `equipoise`.

Eager models keep activations in the blocked layout from layer to layer (`operators.py`). The compiler of torch cannot
follow that layout. Exported programs, and compiled models whose layers run one by one, call these operators, which
convert images to the blocked layout and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equipoise.kernels import operators
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.kernels.geometry import NO_BORDER, ConvShape
from equipoise.kernels.taps import pattern_of

_operators = torch.library.Library("equipoise", "FRAGMENT")
_operators.define(
    "conv(Tensor x, Tensor values, Tensor? bias, Tensor? probe, Tensor index, SymInt[] geometry) -> Tensor"
)
_operators.define(
    "conv_input_grad(Tensor dy, Tensor values, Tensor index, SymInt[] geometry, SymInt[] size) -> Tensor"
)
_operators.define("conv_weight_grad(Tensor x, Tensor dy, Tensor index, SymInt[] geometry) -> (Tensor, Tensor)")


def conv(
    x: Tensor, values: Tensor, bias: Tensor | None, index: Tensor, shape: ConvShape, probe: Tensor | None = None
) -> Tensor:
    """Convolve images (images, channels, height, width) with the active weights only.

    Args:
        x: The images.
        values: Active weights.
        bias: One value per output channel, or `None`.
        index: Ascending flat indices of the active weights, int32.
        shape: The convolution.
        probe: A tensor in the shape of the dense weight; its gradient is that of all weights, active or not.
    """
    pairs = (shape.kernel, shape.stride, shape.padding, shape.dilation)
    geometry = [shape.out_channels, shape.in_channels, *(size for pair in pairs for size in pair), shape.groups]
    return torch.ops.equipoise.conv.default(x, values, bias, probe, index, geometry)


def _shape(geometry: list[int]) -> ConvShape:
    out, inputs, *rest, groups = geometry
    kernel, stride, padding, dilation = ((rest[i], rest[i + 1]) for i in range(0, 8, 2))
    return ConvShape(out, inputs, kernel, stride, padding, dilation, groups)


def _conv(
    x: Tensor, values: Tensor, bias: Tensor | None, probe: Tensor | None, index: Tensor, geometry: list[int]
) -> Tensor:
    shape = _shape(geometry)
    return from_blocked(operators.conv(to_blocked(x, shape.padding), values, bias, pattern_of(shape, index)))


def _input_grad(dy: Tensor, values: Tensor, index: Tensor, geometry: list[int], size: list[int]) -> Tensor:
    shape, blocked = _shape(geometry), to_blocked(dy)
    inputs = torch.Size([blocked.data.shape[0], shape.in_channels, *size])
    dx = operators.input_grad(blocked.data, values, pattern_of(shape, index), inputs, NO_BORDER)
    return from_blocked(blocked.with_data(dx))


def _weight_grad(x: Tensor, dy: Tensor, index: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    shape = _shape(geometry)
    inputs, gradient = to_blocked(x, shape.padding).data, to_blocked(dy).data
    dvalues, dbias = operators.weight_grad(inputs, gradient, pattern_of(shape, index), bias=True)
    assert dbias is not None
    return dvalues, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, _, probe, index, ctx.geometry = inputs
    ctx.save_for_backward(x, values, index)
    ctx.probe_shape = None if probe is None else probe.shape


@once_differentiable
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, index = ctx.saved_tensors
    dx = dvalues = dbias = dprobe = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.equipoise.conv_input_grad.default(dy, values, index, ctx.geometry, x.shape[2:])
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dvalues, dbias = torch.ops.equipoise.conv_weight_grad.default(x, dy, index, ctx.geometry)
    if ctx.needs_input_grad[3]:
        dprobe = operators.dense_weight_grad(x, dy, _shape(ctx.geometry)).view(ctx.probe_shape)
    return dx, dvalues, dbias if ctx.needs_input_grad[2] else None, dprobe, None, None


def _fake_conv(x: Tensor, *rest: Any) -> Tensor:
    shape = _shape(rest[-1])
    return x.new_empty(x.shape[0], shape.out_channels, *shape.output((x.shape[2], x.shape[3])))


for _name, _function, _fake in (
    ("conv", _conv, _fake_conv),
    ("conv_input_grad", _input_grad, lambda dy, v, i, geometry, size: dy.new_empty(dy.shape[0], geometry[1], *size)),
    ("conv_weight_grad", _weight_grad, lambda x, dy, i, g: (x.new_empty(i.shape), x.new_empty(g[0]))),
):
    _operators.impl(_name, _function, "CPU")
    torch.library.register_fake(f"equipoise::{_name}", _fake, lib=_operators)
torch.library.register_autograd("equipoise::conv", _backward, setup_context=_save, lib=_operators)
