"""Random crops, shifts, resized parts and flips of a batch, computed on the device that holds the images."""

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

TRIES = 10  # draws of a part before the centred one is taken


class Moves(NamedTuple):
    """Displacements or parts, and flips, of N images.

    Attributes:
        offsets: int64 [N, 2], displacement of the window in rows and columns; float32 for fractions of a pixel. Of
            resized parts float32 [N, 4]: top, left, height and width, whole numbers.
        flips: bool [N], whether the image is mirrored.
    """

    offsets: Tensor
    flips: Tensor


@dataclass(frozen=True)
class Augment:
    """Random crop of the padded image, or random shift; then a horizontal flip of half of the images.

    The defaults are those of the ITOP pipelines: reflect-pad by 4, random crop, flip. BSR-Net uses
    `Augment(crop=False, shift=0.1)`: a shift of up to ±10 % of the image size. Keras, on which BSR-Net's own code runs,
    shifts by fractions of a pixel and repeats the edge: `Augment(crop=False, shift=0.1, fractional=True)`. RigL's
    CIFAR-100 has torchvision's RandomResizedCrop: `Augment(crop=False, resized=0.08)`.

    Args:
        pad: Pixels added on each side before the crop.
        mode: Fill of the padding, "reflect" or "zero".
        crop: Whether to pad and crop.
        flip: Whether to flip.
        shift: Largest shift as a fraction of the image size; needs `crop=False`. It is a whole number of pixels,
            and the rest of the image is zero.
        fractional: Shift by fractions of a pixel with bilinear interpolation, and fill with the nearest pixel.
        resized: Smallest area of a random part of the image, as a fraction of the whole; 0 for none. The part has an
            aspect ratio between 3/4 and 4/3 and is resized to the size of the image by bilinear interpolation. Needs
            `crop=False`.
    """

    pad: int = 4
    mode: Literal["reflect", "zero"] = "reflect"
    crop: bool = True
    flip: bool = True
    shift: float = 0.0
    fractional: bool = False
    resized: float = 0.0

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
        if isinstance(self.resized, bool) or not isinstance(self.resized, int | float) or not 0 <= self.resized <= 1:
            raise UserError(
                f"resized={self.resized!r} must be a fraction of the image's area, such as 0.08; 0 for none"
            )
        if self.resized and (self.crop or self.shift):
            raise UserError("resized parts are neither cropped nor shifted; set crop=False and shift=0")

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

    def check_size(self, height: int, width: int) -> None:
        """Raise unless images of this size can be padded."""
        if self.reflect and self.pad >= min(height, width):
            raise UserError(f'images of {height}x{width} cannot be reflect-padded by {self.pad}; use mode="zero"')

    def draw(self, count: int, height: int, width: int, seed: int, epoch: int) -> Moves:
        """Draw the moves of `count` images for an epoch; row n is for image n, whichever batch contains it."""
        rng = generator(seed, "offsets", epoch)
        if self.resized:
            offsets = self._parts(count, height, width, rng)
        elif self.fractional:
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

    def _parts(self, count: int, height: int, width: int, rng: torch.Generator) -> Tensor:
        """Draw a part of each image: the first of ten that fits, else the largest centred one."""
        drawn = torch.rand(4, count, TRIES, generator=rng, dtype=torch.float32)
        area = height * width * torch.lerp(torch.tensor(self.resized), torch.tensor(1.0), drawn[0])
        ratio = (math.log(4 / 3) * (2 * drawn[1] - 1)).exp()
        high, wide = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
        fits = (high >= 1) & (high <= height) & (wide >= 1) & (wide <= width)
        top, left = (drawn[2] * (height - high + 1)).floor(), (drawn[3] * (width - wide + 1)).floor()
        first = fits.int().argmax(1, keepdim=True)  # of the largest, the first
        parts = torch.stack([part.gather(1, first)[:, 0] for part in (top, left, high, wide)], dim=1)
        most = [min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))]
        centred = torch.tensor([(height - most[0]) // 2, (width - most[1]) // 2, *most], dtype=parts.dtype)
        return torch.where(fits.any(1, keepdim=True), parts, centred)


def move(images: Tensor, moves: Moves, *, reflect: bool) -> Tensor:
    """Displace the window onto each image by its offset, then mirror the flipped ones.

    An offset of (1, 0) moves the window one row down. Displacing by up to `pad` equals padding by `pad` and
    cropping at random. Fractions of a pixel are interpolated bilinearly, and pixels outside the image are those of its
    nearest edge. A part is resized to the image, without pixels from outside the part. The function is pure and does
    not synchronise with the host, so it can be compiled.

    Args:
        images: [B, C, H, W].
        moves: One row per image. With fractional offsets the result is float32.
        reflect: Fill with the mirror image, without repeating the edge, rather than with zeros. Offsets must
            then be smaller than the image.
    """
    height, width = images.shape[-2:]
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    columns = torch.where(moves.flips[:, None], width - 1 - columns, columns)
    if moves.offsets.shape[1] == 4:
        top, left, high, wide = moves.offsets.split(1, dim=1)
        return _interpolate(images, _stretched(rows, top, high, height), _stretched(columns, left, wide, width))
    rows, columns = rows + moves.offsets[:, :1], columns + moves.offsets[:, 1:]
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


def _stretched(index: Tensor, start: Tensor, part: Tensor, size: int) -> Tensor:
    """Where the pixels of a resized part lie in the image, between the centres of its first and last pixel."""
    return start + ((index + 0.5) * (part / size) - 0.5).clamp(min=0).minimum(part - 1)


def _mirrored(index: Tensor, size: int) -> Tensor:
    last = size - 1
    return last - (last - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
