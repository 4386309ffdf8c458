"""Estimated time of a layer on the sparse kernels and on torch's dense ones.

Times are those of a forward and a backward pass, per image and position of the output, in units of one weight of a
dense convolution. They were fitted to layers of 32 to 512 channels on one core with AVX-512 (`bench/cpu.py layers`).

A call also takes a time that does not depend on the number of positions: Python, the active weights that the sparse
kernel sorts, or the dense weight that is written and its gradient that is read. It decides in small layers and batches.
Times of calls in blocks and of norms were read off chains of convolution, BatchNorm and ReLU with 8 to 128 channels.
"""

from __future__ import annotations

import math

from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.library import LANES

SPARSE_WEIGHT = 2.0  # an active weight in the sparse kernels
BLOCK_WEIGHT = 1.65  # the same in the kernel for blocks of 16 outputs
SPARSE_CHANNEL = 20  # a channel that a sparse convolution reads or writes
CONVERTED_CHANNEL = 60  # a channel converted to the blocked layout or back
TOKEN_WEIGHT, TOKEN_CHANNEL = 2.2, 10  # the same for a linear layer on row-major vectors
DEPTHWISE_WEIGHT = 7  # a weight of torch's depthwise convolution
LEAVING = 1.2  # margin for leaving the blocked layout inside a network and coming back
BLOCKED = 1.04  # margin for the blocked layout: in a tie the plain one wins, which can be channels_last
ALONE = 1.7  # margin for a single layer: conversions, and the layers after it lose channels_last
CALL_ON_TOKENS = 2e6  # a call of the sparse linear kernel
CALL_ON_IMAGES = 8e6  # a call of the sparse convolution on plain tensors
CALL_OF_SPREAD = 3e5  # making a dense weight
CALL_IN_BLOCKS = 1.5e6  # a call of a sparse layer and the operations after it in the blocked layout, beyond torch's
CALL_OF_CONVERSION = 1.2e6  # a call that converts an activation
NORM_CHANNEL = 37  # a channel read or written by a layer and the operations after it, in either layout
SEPARATE_CHANNEL = 20  # of the output, more if those operations do not run in one pass
SORTED_WEIGHT, SPREAD_WEIGHT = 60, 5  # an active weight of the sparse kernel, and an element of a spread weight
FEW_CHANNELS = 64  # of input and output together; smaller layers need a batch for an estimate: fixed costs decide


def is_small(shape: ConvShape) -> bool:
    """Return whether a layer has too few channels for an estimate."""
    return shape.in_channels + shape.out_channels < FEW_CHANNELS


def dense(shape: ConvShape) -> float:
    """Return the time of torch's dense kernel."""
    depthwise = 1 < shape.groups == shape.in_channels
    return shape.weight_numel * (DEPTHWISE_WEIGHT if depthwise else 1)


def sparse(shape: ConvShape, active: int, images: int = LANES, weight: float = SPARSE_WEIGHT) -> float:
    """Return the time of the sparse kernel on blocked activations; `weight` is that of one active weight."""
    return padding(images) * (weight * active + SPARSE_CHANNEL * _channels(shape))


def padding(images: int, lanes: int = LANES) -> float:
    """Return the factor by which a batch of fewer than `lanes` images grows in the blocked layout."""
    return max(1.0, lanes / max(1, images))


def conversion(shape: ConvShape) -> float:
    """Return the time of converting the input and the output of a layer from one layout to the other."""
    return CONVERTED_CHANNEL * _channels(shape)


def sparse_alone(shape: ConvShape, active: int, images: int) -> float:
    """Return the time of the sparse kernel between plain tensors."""
    return ALONE * (sparse(shape, active, images) + conversion(shape))


def sparse_call(active: int, on_tokens: bool) -> float:
    """Return the time of a call of the sparse kernel between plain tensors that does not depend on its input."""
    return (CALL_ON_TOKENS if on_tokens else CALL_ON_IMAGES) + SORTED_WEIGHT * active


def dense_call(shape: ConvShape, active: int) -> float:
    """Return the time of making the dense weight for a call; a weight without zeros is there already."""
    return 0.0 if active == shape.weight_numel else CALL_OF_SPREAD + SPREAD_WEIGHT * shape.weight_numel


def with_norm(shape: ConvShape) -> float:
    """Return the time of torch's dense kernel, a norm and an activation function after it."""
    return dense(shape) + NORM_CHANNEL * _channels(shape) + SEPARATE_CHANNEL * shape.out_channels


def with_norm_in_blocks(shape: ConvShape, active: int) -> float:
    """Return the time of the sparse kernel, a norm and an activation function in the blocked layout."""
    return SPARSE_WEIGHT * active + NORM_CHANNEL * _channels(shape)


def outside_blocks(shape: ConvShape) -> float:
    """Return the time of torch's dense kernel between layers in the blocked layout."""
    return LEAVING * (dense(shape) + conversion(shape))


def sparse_on_tokens(shape: ConvShape, active: int) -> float:
    """Return the time of the sparse linear kernel on row-major vectors."""
    return TOKEN_WEIGHT * active + TOKEN_CHANNEL * _channels(shape)


def _channels(shape: ConvShape) -> int:
    """Channels read and written for one position of the output."""
    return shape.in_channels * math.prod(shape.stride) + shape.out_channels
