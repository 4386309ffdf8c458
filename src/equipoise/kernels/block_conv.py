"""Blocked convolution with weights in blocks of 16 outputs x 1 input: forward and both gradients."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from equipoise.kernels import boundary, library
from equipoise.kernels.blocks import OUTPUTS, Blocks, Integers
from equipoise.kernels.huge_pages import Floats
from equipoise.kernels.library import Map
from equipoise.kernels.planes import address


def forward(x: Tensor, y: Tensor, values: Tensor, bias: Tensor | None, blocks: Blocks) -> None:
    """Write the convolution of `x`, which has a border for its padding, to `y`."""
    source, offsets, reach = _describe_source(x, y, blocks)
    weights = _weights(values, blocks)
    library.load().eq_block_conv(
        byref(source),
        byref(boundary.describe(y)),
        address(blocks.start),
        address(offsets),
        address(weights),
        blocks.kernel,
        reach,
        boundary.address(bias, blocks.shape.out_channels, "bias"),
        0,  # no ReLU
        boundary.is_half(x, y),
        library.threads(),
    )


def input_grad(dy: Tensor, dx: Tensor, values: Tensor, blocks: Blocks) -> None:
    """Write the gradient of the input to `dx`. No border of `dy` is read."""
    weights = _weights(values, blocks)
    library.load().eq_block_input_grad(
        byref(boundary.describe(dy)),
        byref(boundary.describe(dx)),
        address(blocks.start),
        address(blocks.source),
        address(weights),
        blocks.kernel,
        address(blocks.reach),
        address(blocks.stride),
        boundary.is_half(dy, dx),
        library.threads(),
    )


def weight_grad(x: Tensor, dy: Tensor, dbias: Tensor | None, blocks: Blocks) -> Tensor:
    """Return the gradient of the active weights, and write that of the bias to `dbias`."""
    source, offsets, _ = _describe_source(x, dy, blocks)
    sums = np.empty(blocks.count * OUTPUTS, np.float32)
    library.load().eq_block_grad(
        byref(source),
        byref(boundary.describe(dy)),
        address(blocks.start),
        address(offsets),
        blocks.kernel,
        address(sums),
        boundary.address(dbias, blocks.shape.out_channels, "gradient of the bias"),
        boundary.is_half(x, dy),
        library.threads(),
    )
    return torch.from_numpy(blocks.values(sums))


def _weights(values: Tensor, blocks: Blocks) -> Floats:
    """Return the values in the order of the taps, after a check that the kernels can read them."""
    checked = boundary.as_vector(values.detach(), blocks.count * OUTPUTS, "values")
    assert checked is not None
    return blocks.weights(checked.numpy())


def _describe_source(x: Tensor, y: Tensor, blocks: Blocks) -> tuple[Map, Integers, int]:
    """Describe the input of a convolution; return also the offset of each tap and the largest one within a plane."""
    offsets, extent, reach = blocks.laid_out(*boundary.plane_steps(x))
    return boundary.describe_source(x, y.shape, blocks.shape.stride, extent), offsets, reach
