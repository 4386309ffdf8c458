"""Sparse linear layers on row-major vectors, as PyTorch operators in the namespace `equipoise`.

`torch.library.custom_op` would import the compiler at the first call, which takes seconds. The operators are therefore
defined by the functions of `torch.library` underneath it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equipoise.kernels import boundary, library
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.library import CHUNK
from equipoise.kernels.taps import Pattern, pattern_of

_operators = torch.library.Library("equipoise", "FRAGMENT")
_operators.define(
    "linear(Tensor x, Tensor values, Tensor? bias, Tensor? probe, Tensor index, SymInt[] shape) -> Tensor"
)
_operators.define("linear_input_grad(Tensor dy, Tensor values, Tensor index, SymInt in_features) -> Tensor")
_operators.define("linear_grad(Tensor x, Tensor dy, Tensor? values, Tensor index) -> (Tensor, Tensor, Tensor)")


def linear(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    index: Tensor,
    shape: tuple[int, int],
    probe: Tensor | None = None,
) -> Tensor:
    """Apply a linear layer with the active weights only.

    Args:
        x: Vectors, with any leading dimensions.
        values: Active weights.
        bias: One value per output, or `None`.
        index: Ascending flat indices of the active weights, int32.
        shape: Shape of the dense weight: outputs and inputs.
        probe: A tensor in the shape of the dense weight; its gradient is that of all weights, active or not.

    Raises:
        UserError: If a tensor is not on the CPU, not of the type above, or of another length.
    """
    if not torch.compiler.is_compiling():  # the operators themselves check again in compiled code
        _check_types(x, values, bias, index)
    return torch.ops.equipoise.linear.default(x, values, bias, probe, index, shape)


def _check_types(x: Tensor, values: Tensor, bias: Tensor | None, index: Tensor) -> None:
    """Refuse wrong types and devices before torch chooses an implementation by the devices of all tensors."""
    for tensor, name in ((x, "input"), (values, "values"), (bias, "bias")):
        if tensor is not None:
            boundary.check_type(tensor, name)
    boundary.check_type(index, "index", torch.int32)


def _multiply(
    x: Tensor, values: Tensor, bias: Tensor | None, pattern: Pattern, transposed: bool, features: int
) -> Tensor:
    """The product of each vector with the weight, or with its transpose."""
    y = x.new_empty(*x.shape[:-1], features)
    x, vector = x.resolve_neg().contiguous(), boundary.as_vector(bias, features, "bias")
    tokens = x.shape[:-1].numel()
    with pattern.lend(transposed) as taps:
        taps.load(values, CHUNK, 0)
        library.load().eq_linear(
            boundary.address(x, tokens * taps.sorted.sources, "input"),
            boundary.address(y, tokens * taps.sorted.rows, "output"),
            tokens,
            taps.sorted.sources,
            taps.sorted.rows,
            taps.address,
            taps.sorted.start_at(),
            taps.sorted.blocks,
            boundary.address(vector, features, "bias"),
            library.threads(),
        )
    return y


def _linear(
    x: Tensor, values: Tensor, bias: Tensor | None, probe: Tensor | None, index: Tensor, shape: list[int]
) -> Tensor:
    geometry = ConvShape(shape[0], shape[1])
    geometry.check_channels(x.shape[-1])
    return _multiply(x, values, bias, pattern_of(geometry, index), False, shape[0])


def _input_grad(dy: Tensor, values: Tensor, index: Tensor, in_features: int) -> Tensor:
    return _multiply(dy, values, None, pattern_of(ConvShape(dy.shape[-1], in_features), index), True, in_features)


def _grad(x: Tensor, dy: Tensor, values: Tensor | None, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, of the active weights and of the bias; that of the input is empty without `values`."""
    tokens, features, out_features = x.shape[:-1].numel(), x.shape[-1], dy.shape[-1]
    dx = x.new_empty(0) if values is None else x.new_empty(x.shape)
    x, dy, count = x.contiguous(), dy.resolve_neg().contiguous(), index.numel()
    dvalues, dbias = x.new_empty(count), x.new_empty(out_features)
    pattern = pattern_of(ConvShape(out_features, features), index)
    with pattern.lend() as taps, nullcontext() if values is None else pattern.lend(True) as back:
        taps.set_steps(CHUNK, 0)
        into_dx: tuple[int | None, ...] = (None, None, 0, None)
        if values is not None and back is not None:
            back.load(values, CHUNK, 0)
            at = boundary.address(dx, tokens * features, "gradient of the input")
            into_dx = (back.address, back.sorted.start_at(), back.sorted.blocks, at)
        library.load().eq_linear_grad(
            boundary.address(x, tokens * features, "input"),
            boundary.address(dy, tokens * out_features, "gradient of the output"),
            tokens,
            features,
            out_features,
            taps.address,
            taps.sorted.start_at(),
            taps.sorted.order_at,
            taps.sorted.blocks,
            boundary.address(dvalues, count, "gradient of the weights"),
            boundary.address(dbias, out_features, "gradient of the bias"),
            *into_dx,
            library.threads(),
        )
    return dx, dvalues, dbias


def _fake_grad(x: Tensor, dy: Tensor, values: Tensor | None, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(0) if values is None else x.new_empty(x.shape)
    return dx, x.new_empty(index.shape), x.new_empty(dy.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, _, _, index, _ = inputs
    ctx.save_for_backward(x, values, index)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@once_differentiable
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, index = ctx.saved_tensors
    operators = torch.ops.equipoise
    dx = dvalues = dbias = dprobe = None
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        for_dx = values if ctx.needs_input_grad[0] else None
        dx, dvalues, dbias = operators.linear_grad.default(x, dy, for_dx, index)
    elif ctx.needs_input_grad[0]:
        dx = operators.linear_input_grad.default(dy, values, index, x.shape[-1])
    if ctx.needs_input_grad[3]:
        dprobe = _as_matrix(dy).T @ _as_matrix(x)
    # torch accepts no gradient of an argument that was `None`
    return (
        dx if ctx.needs_input_grad[0] else None,
        dvalues,
        dbias if ctx.needs_input_grad[2] else None,
        dprobe,
        None,
        None,
    )


for _name, _function, _fake in (
    ("linear", _linear, lambda x, *rest: x.new_empty(*x.shape[:-1], rest[-1][0])),
    ("linear_input_grad", _input_grad, lambda dy, *rest: dy.new_empty(*dy.shape[:-1], rest[-1])),
    ("linear_grad", _grad, _fake_grad),
):
    _operators.impl(_name, _function, "CPU")
    torch.library.register_fake(f"equipoise::{_name}", _fake, lib=_operators)
torch.library.register_autograd("equipoise::linear", _backward, setup_context=_save, lib=_operators)
