"""Blocked convolution with weights in blocks of 16 outputs x 1 input: forward and both gradients."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from equipoise.kernels import boundary, library
from equipoise.kernels.blocks import OUTPUTS, Blocks
from equipoise.kernels.geometry import Border, Pair
from equipoise.kernels.planes import address

CACHE_PERIOD = 64  # positions in 4 KiB, at which addresses share a set of the first-level cache


def spread(size: Pair, border: Border) -> Border:
    """Return the border of an input gradient of this size: a wider one if the same cache set held all channels."""
    high, wide = (length + 2 * zeros for length, zeros in zip(size, border, strict=True))
    return (border[0] + 1, border[1] + 1) if high * wide % CACHE_PERIOD == 0 else border


def forward(x: Tensor, y: Tensor, values: Tensor, bias: Tensor | None, blocks: Blocks) -> None:
    """Write the convolution of `x`, which has a border for its padding, to `y`."""
    within = blocks.tap_offsets(x.stride(2))
    offsets, weights = blocks.offsets(x.stride(1), within), blocks.weights(values.detach().numpy())
    library.load().eq_block_conv(
        byref(boundary.describe_source(x, y.shape, blocks.shape.stride, blocks.extent(x.stride(1), within))),
        byref(boundary.describe(y)),
        address(blocks.start),
        address(offsets),
        address(weights),
        blocks.kernel,
        int(within.max()),
        boundary.address(bias, blocks.shape.out_channels, "bias"),
        0,  # no ReLU
        0,  # float32 maps
        library.threads(),
    )


def input_grad(dy: Tensor, dx: Tensor, values: Tensor, blocks: Blocks) -> None:
    """Write the gradient of the input to `dx`. No border of `dy` is read."""
    offsets = blocks.offsets(dx.stride(1), blocks.tap_offsets(dx.stride(2)))
    weights = blocks.weights(values.detach().numpy())
    library.load().eq_block_input_grad(
        byref(boundary.describe(dy)),
        byref(boundary.describe(dx)),
        address(blocks.start),
        address(offsets),
        address(weights),
        blocks.kernel,
        address(blocks.reach),
        address(blocks.stride),
        library.threads(),
    )


def weight_grad(x: Tensor, dy: Tensor, dbias: Tensor | None, blocks: Blocks) -> Tensor:
    """Return the gradient of the active weights, and write that of the bias to `dbias`."""
    within = blocks.tap_offsets(x.stride(2))
    offsets, sums = blocks.offsets(x.stride(1), within), np.empty(blocks.count * OUTPUTS, np.float32)
    library.load().eq_block_grad(
        byref(boundary.describe_source(x, dy.shape, blocks.shape.stride, blocks.extent(x.stride(1), within))),
        byref(boundary.describe(dy)),
        address(blocks.start),
        address(offsets),
        blocks.kernel,
        address(sums),
        boundary.address(dbias, blocks.shape.out_channels, "gradient of the bias"),
        library.threads(),
    )
    return torch.from_numpy(blocks.values(sums))
