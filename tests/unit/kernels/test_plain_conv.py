"""Sparse convolution of plain images as operators of PyTorch, against dense PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.kernels import library
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.plain_conv import conv

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())

SHAPES = [
    ConvShape(6, 4, (3, 3), padding=(1, 1)),
    ConvShape(6, 4, (2, 3), (2, 1), (0, 2), (1, 2), 2),
    ConvShape(5, 3, (1, 1), (3, 2)),
]


def layer(shape: ConvShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, sparse weight and bias in float64, and the indices of active weights."""
    torch.manual_seed(0)
    weight = torch.randn(shape.out_channels, shape.in_channels // shape.groups, *shape.kernel, dtype=torch.float64)
    mask = torch.rand(weight.shape) < 0.4
    x = torch.randn(5, shape.in_channels, 7, 8, dtype=torch.float64)
    bias = torch.randn(shape.out_channels, dtype=torch.float64)
    return x, weight * mask, bias, mask.flatten().nonzero().flatten().int()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients(shape: ConvShape, biased: bool) -> None:
    x, weight, bias, index = layer(shape)
    exact_in = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    options = (shape.stride, shape.padding, shape.dilation, shape.groups)
    exact = F.conv2d(x, weight, bias if biased else None, *options)
    dy = torch.randn_like(exact)
    dx, dweight = torch.autograd.grad(exact, exact_in[:2], dy)

    mine_in = [t.detach().float().requires_grad_() for t in (x, weight.flatten()[index.long()], bias)]
    probe = torch.zeros(weight.shape, requires_grad=True)
    mine = conv(mine_in[0], mine_in[1], mine_in[2] if biased else None, index, shape, probe)
    mine.backward(dy.float())
    wanted = [exact.detach(), dx, dweight.flatten()[index.long()], dweight]
    for found, value in zip([mine.detach(), mine_in[0].grad, mine_in[1].grad, probe.grad], wanted, strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), value, rtol=1e-4, atol=1e-4)
    if biased:
        assert mine_in[2].grad is not None
        torch.testing.assert_close(mine_in[2].grad.double(), dy.sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_the_operators_are_registered_completely() -> None:
    x, weight, bias, index = layer(SHAPES[1])
    geometry = [6, 4, 2, 3, 2, 1, 0, 2, 1, 2, 2]
    inputs, values = x.float(), weight.flatten()[index.long()].float()
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs, values, bias.float())]
    probe = torch.zeros(weight.shape, requires_grad=True)
    operators = torch.ops.equipoise
    torch.library.opcheck(operators.conv.default, (*leaves, probe, index, geometry))
    dy = torch.randn_like(operators.conv(inputs, values, None, None, index, geometry))
    torch.library.opcheck(operators.conv_input_grad.default, (dy, values, index, geometry, [7, 8]))
    torch.library.opcheck(operators.conv_weight_grad.default, (inputs, dy, index, geometry))
