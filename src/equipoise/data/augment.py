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
        offsets: int64 [N, 2], displacement of the window in rows and columns.
        flips: bool [N], whether the image is mirrored.
    """

    offsets: Tensor
    flips: Tensor


@dataclass(frozen=True)
class Augment:
    """Random crop of the padded image, or random shift; then a horizontal flip of half of the images.

    The defaults are those of the ITOP pipelines: reflect-pad by 4, random crop, flip. BSR-Net uses
    `Augment(crop=False, shift=0.1)`: a shift of up to ±10 % of the image size, filled with zeros.

    Args:
        pad: Pixels added on each side before the crop.
        mode: Fill of the padding, "reflect" or "zero".
        crop: Whether to pad and crop.
        flip: Whether to flip.
        shift: Largest shift as a fraction of the image size; needs `crop=False`.
    """

    pad: int = 4
    mode: Literal["reflect", "zero"] = "reflect"
    crop: bool = True
    flip: bool = True
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("reflect", "zero"):
            raise UserError(f'no padding is called "{self.mode}"{suggestion(str(self.mode), ["reflect", "zero"])}')
        require_whole(least=0, pad=self.pad)
        if isinstance(self.shift, bool) or not isinstance(self.shift, int | float) or not 0 <= self.shift < 1:
            raise UserError(f"shift={self.shift!r} must be a fraction of the image size, at least 0 and below 1")
        if self.crop and self.shift:
            raise UserError("crop and shift both move the image; with shift, set crop=False")

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
        reach = self.reach(height, width)
        if self.reflect and self.pad >= min(height, width):
            raise UserError(f'images of {height}x{width} cannot be reflect-padded by {self.pad}; use mode="zero"')
        rng = generator(seed, "offsets", epoch)
        offsets = torch.stack([torch.randint(-r, r + 1, (count,), generator=rng) for r in reach], dim=1)
        flips = torch.zeros(count, dtype=torch.bool)
        if self.flip:
            flips = torch.randint(2, (count,), generator=generator(seed, "flips", epoch)).bool()
        return Moves(offsets, flips)


def move(images: Tensor, moves: Moves, *, reflect: bool) -> Tensor:
    """Displace the window onto each image by its offset, then mirror the flipped ones.

    An offset of (1, 0) moves the window one row down. Displacing by up to `pad` equals padding by `pad` and
    cropping at random. The function is pure and does not synchronise with the host, so it can be compiled.

    Args:
        images: [B, C, H, W].
        moves: One row per image.
        reflect: Fill with the mirror image, without repeating the edge, rather than with zeros. Offsets must
            then be smaller than the image.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + moves.offsets[:, :1]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(moves.flips[:, None], width - 1 - columns, columns) + moves.offsets[:, 1:]
    if reflect:
        return _gather(images, _mirrored(rows, height), _mirrored(columns, width))
    inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
    return _gather(images, rows.clamp(0, height - 1), columns.clamp(0, width - 1)) * inside[:, None]


def _gather(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixel (r, c) of the result is pixel (rows[r], columns[c]); one gather for all images and channels."""
    index = rows[:, :, None] * images.shape[-1] + columns[:, None, :]
    index = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view(images.shape)


def _mirrored(index: Tensor, size: int) -> Tensor:
    last = size - 1
    return last - (last - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
