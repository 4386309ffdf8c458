"""Geometry of convolutions and of their taps, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.errors import UserError

Pair = tuple[int, int]
Border = Pair
NO_BORDER: Border = (0, 0)
# A block of source channels should stay in the first-level cache while all destination channels read it,
# but each destination needs enough taps per block to pay for loading and storing its accumulators.
TAPS_PER_VISIT = 24
CACHED_CHANNELS = 16


@dataclass(frozen=True)
class ConvShape:
    """Geometry of a convolution. A linear layer is a convolution with a 1x1 kernel on 1x1 maps."""

    out_channels: int
    in_channels: int
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        sizes = (self.groups, *self.kernel, *self.stride, *self.dilation)
        channels = (self.out_channels, self.in_channels)
        if min(sizes) < 1 or min(*channels, *self.padding) < 0 or any(c % self.groups for c in channels):
            raise UserError(f"no convolution has this geometry: {self}")

    @property
    def weight_numel(self) -> int:
        """Number of weights, active and inactive."""
        return self.out_channels * (self.in_channels // self.groups) * self.kernel[0] * self.kernel[1]

    def of_patches(self) -> ConvShape | None:
        """Return the linear layer that this convolution is on its patches; `None` if they overlap or leave gaps."""
        whole = self.kernel == self.stride and self.kernel != (1, 1) and self.groups == 1
        if not whole or self.padding != (0, 0) or self.dilation != (1, 1):
            return None
        return ConvShape(self.out_channels, self.in_channels * self.kernel[0] * self.kernel[1])

    def check_channels(self, channels: int) -> None:
        """Refuse an input of other channels: the kernels trust the pattern and would read beyond its end."""
        if channels != self.in_channels:
            raise UserError(f"the layer takes {self.in_channels} channels, the input has {channels}")

    def output(self, size: Pair) -> Pair:
        """Return height and width of the output for an input of `size`."""
        out = tuple(
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, k, t, p, d in zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        if min(out) < 1:
            raise UserError(f"a map of {size[0]}x{size[1]} is too small for a kernel of {self.kernel}")
        return out[0], out[1]

    def grad_border(self, size: Pair) -> Border:
        """Return the zeros that the input gradient reads around an output gradient, for an input of `size`."""
        axes = zip(size, self.output(size), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        wanted = [max(0, (d * (k - 1) - p) // t, (s - 1 + p) // t - (o - 1)) for s, o, k, t, p, d in axes]
        return wanted[0], wanted[1]


def source_block(sources: int, rows: int, count: int) -> int:
    """Return the source channels that form a block, for `count` taps and `rows` destinations."""
    visits = max(1, count // max(1, rows * TAPS_PER_VISIT))
    return max(CACHED_CHANNELS, -(-sources // visits))


def check_pool(dims: int, size: Pair, kernel: Pair) -> None:
    """Check that pooling windows fit into the map.

    torch pools batches of 2 and 3 dimensions along other axes than the kernels would.
    """
    if dims != 4:
        raise UserError(f"pooling in a packed model takes a batch of 4 dimensions, not {dims}")
    if size[0] < kernel[0] or size[1] < kernel[1]:
        raise UserError(f"a map of {size[0]}x{size[1]} is too small for pooling by {kernel[0]}x{kernel[1]}")
