"""Random crops, shifts and flips of a batch, computed on the device that holds the images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.catalogue import suggestion
from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.seeds import generator


class Moves(NamedTuple):
    """Displacements and flips of N images.

    Attributes:
        offsets: int64 [N, 2], displacement of the window in rows and columns; float32 for fractions of a pixel.
        flips: bool [N], whether the image is mirrored.
    """

    offsets: Tensor
    flips: Tensor


@dataclass(frozen=True)
class Augment:
    """Random crop of the padded image, or random shift; then a horizontal flip of half of the images.

    The defaults are those of the ITOP pipelines: reflect-pad by 4, random crop, flip. BSR-Net uses
    `Augment(crop=False, shift=0.1)`: a shift of up to ±10 % of the image size. Keras, on which BSR-Net's own code runs,
    shifts by fractions of a pixel and repeats the edge: `Augment(crop=False, shift=0.1, fractional=True)`.

    Args:
        pad: Pixels added on each side before the crop.
        mode: Fill of the padding, "reflect" or "zero".
        crop: Whether to pad and crop.
        flip: Whether to flip.
        shift: Largest shift as a fraction of the image size; needs `crop=False`. It is a whole number of pixels,
            and the rest of the image is zero.
        fractional: Shift by fractions of a pixel with bilinear interpolation, and fill with the nearest pixel.
    """

    pad: int = 4
    mode: Literal["reflect", "zero"] = "reflect"
    crop: bool = True
    flip: bool = True
    shift: float = 0.0
    fractional: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("reflect", "zero"):
            raise UserError(f'no padding is called "{self.mode}"{suggestion(str(self.mode), ["reflect", "zero"])}')
        require_whole(least=0, pad=self.pad)
        if isinstance(self.shift, bool) or not isinstance(self.shift, int | float) or not 0 <= self.shift < 1:
            raise UserError(f"shift={self.shift!r} must be a fraction of the image size, at least 0 and below 1")
        if self.crop and self.shift:
            raise UserError("crop and shift both move the image; with shift, set crop=False")
        if self.fractional and not self.shift:
            raise UserError("fractional is about a shift; set shift, such as 0.1")

    @property
    def reflect(self) -> bool:
        """Whether pixels from outside the image are reflected rather than zero."""
        return self.crop and self.mode == "reflect"

    def reach(self, height: int, width: int) -> tuple[int, int]:
        """Largest displacement in rows and in columns."""
        if self.crop:
            return self.pad, self.pad
        # 1e-9 keeps 0.29 * 100 at 29.
        return math.floor(self.shift * height + 1e-9), math.floor(self.shift * width + 1e-9)

    def draw(self, count: int, height: int, width: int, seed: int, epoch: int) -> Moves:
        """Draw the moves of `count` images for an epoch; row n is for image n, whichever batch contains it."""
        if self.reflect and self.pad >= min(height, width):
            raise UserError(f'images of {height}x{width} cannot be reflect-padded by {self.pad}; use mode="zero"')
        rng = generator(seed, "offsets", epoch)
        if self.fractional:
            reach = torch.tensor([self.shift * height, self.shift * width], dtype=torch.float32)
            offsets = (2 * torch.rand(count, 2, generator=rng, dtype=torch.float32) - 1) * reach
        else:
            offsets = torch.stack(
                [torch.randint(-r, r + 1, (count,), generator=rng) for r in self.reach(height, width)], dim=1
            )
        flips = torch.zeros(count, dtype=torch.bool)
        if self.flip:
            flips = torch.randint(2, (count,), generator=generator(seed, "flips", epoch)).bool()
        return Moves(offsets, flips)


def move(images: Tensor, moves: Moves, *, reflect: bool) -> Tensor:
    """Displace the window onto each image by its offset, then mirror the flipped ones.

    An offset of (1, 0) moves the window one row down. Displacing by up to `pad` equals padding by `pad` and
    cropping at random. Fractions of a pixel are interpolated bilinearly, and pixels outside the image are those of its
    nearest edge. The function is pure and does not synchronise with the host, so it can be compiled.

    Args:
        images: [B, C, H, W].
        moves: One row per image. With fractional offsets the result is float32.
        reflect: Fill with the mirror image, without repeating the edge, rather than with zeros. Offsets must
            then be smaller than the image.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + moves.offsets[:, :1]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(moves.flips[:, None], width - 1 - columns, columns) + moves.offsets[:, 1:]
    if moves.offsets.is_floating_point():
        return _interpolate(images, rows.clamp(0, height - 1), columns.clamp(0, width - 1))
    if reflect:
        return _gather(images, _mirrored(rows, height), _mirrored(columns, width))
    inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
    return _gather(images, rows.clamp(0, height - 1), columns.clamp(0, width - 1)) * inside[:, None]


def _gather(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixel (r, c) of the result is pixel (rows[r], columns[c]); one gather for all images and channels."""
    index = rows[:, :, None] * images.shape[-1] + columns[:, None, :]
    index = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view(images.shape)


def _interpolate(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixel (r, c) of the result is the bilinear mean of the four around (rows[r], columns[c]), inside the image."""
    top, left = rows.long(), columns.long()
    bottom, right = (top + 1).clamp(max=images.shape[-2] - 1), (left + 1).clamp(max=images.shape[-1] - 1)
    down, across = (rows - top)[:, None, :, None], (columns - left)[:, None, None, :]

    def blend(row: Tensor) -> Tensor:
        return torch.lerp(_gather(images, row, left).float(), _gather(images, row, right).float(), across)

    return torch.lerp(blend(top), blend(bottom), down)


def _mirrored(index: Tensor, size: int) -> Tensor:
    last = size - 1
    return last - (last - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
