"""Random crops, shifts and flips of a batch, on the device where the images are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.catalogue import suggestion
from equipoise.data.checks import require_whole
from equipoise.errors import UserError
from equipoise.seeds import generator


class Moves(NamedTuple):
    """What happens to each of N images: displaced by `offsets` (rows, columns) [N, 2], mirrored by `flips` [N]."""

    offsets: Tensor
    flips: Tensor


@dataclass(frozen=True)
class Augment:
    """Pad and crop at random, or shift at random; then flip half of the images.

    The defaults are those of the ITOP pipelines: reflect-pad 4, random crop, horizontal flip.
    BSR-Net's are `Augment(crop=False, shift=0.1)`: a shift of up to ±10 % of the size, zeros moving in.
    `mode` is how `pad` fills the border: "reflect" or "zero".
    """

    pad: int = 4
    mode: Literal["reflect", "zero"] = "reflect"
    crop: bool = True
    flip: bool = True
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("reflect", "zero"):
            raise UserError(f'no padding is called "{self.mode}"{suggestion(str(self.mode), ["reflect", "zero"])}')
        require_whole("pad", self.pad, 0)
        if isinstance(self.shift, bool) or not isinstance(self.shift, int | float) or not 0 <= self.shift < 1:
            raise UserError(f"shift={self.shift!r} must be a fraction of the image size, from 0 to below 1")
        if self.crop and self.shift:
            raise UserError("crop and shift both move the image; with shift, say crop=False")

    @property
    def reflect(self) -> bool:
        """Whether what moves in from outside is the mirrored image rather than zeros."""
        return self.crop and self.mode == "reflect"

    def reach(self, height: int, width: int) -> tuple[int, int]:
        """The largest displacement in rows and in columns."""
        if self.crop:
            return self.pad, self.pad
        # The small number keeps 0.29 * 100 at 29.
        return math.floor(self.shift * height + 1e-9), math.floor(self.shift * width + 1e-9)

    def draw(self, count: int, height: int, width: int, seed: int, epoch: int) -> Moves:
        """The moves of all `count` images in an epoch: row n belongs to image n, whatever batch it is in."""
        reach = self.reach(height, width)
        if self.reflect and self.pad >= min(height, width):
            raise UserError(f"images of {height}x{width} cannot be reflect-padded by {self.pad}; mode='zero' can")
        rng = generator(seed, "offsets", epoch)
        offsets = torch.stack([torch.randint(-r, r + 1, (count,), generator=rng) for r in reach], dim=1)
        flips = torch.zeros(count, dtype=torch.bool)
        if self.flip:
            flips = torch.randint(2, (count,), generator=generator(seed, "flips", epoch)).bool()
        return Moves(offsets, flips)


def move(images: Tensor, moves: Moves, *, reflect: bool) -> Tensor:
    """Each image of [B, C, H, W] seen through a window displaced by its offset, then mirrored if it flips.

    An offset of (1, 0) moves the window one row down. Displacing by up to `pad` is padding by
    `pad` and cropping at random. Outside the image lie zeros, or with `reflect` its mirror image
    (without the edge repeated, for offsets smaller than the image).
    A pure function without host synchronisation, made to be compiled.
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
    places = rows[:, :, None] * images.shape[-1] + columns[:, None, :]
    places = places.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, places).view(images.shape)


def _mirrored(places: Tensor, size: int) -> Tensor:
    last = size - 1
    return last - (last - places.abs()).abs()


def _inside(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)
