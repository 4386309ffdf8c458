"""Decode an image file and crop it to the square that the network sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class ResizedCrop:
    """Random part of the image, resized to a square and flipped half of the time (Szegedy et al., 2015).

    Args:
        scale: Range of the part's area, as a fraction of the image's area.
        ratio: Range of the part's aspect ratio.
        flip: Whether to flip.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        if not (_is_range(self.scale) and self.scale[1] <= 1):
            raise UserError(f"scale={self.scale!r} must be two fractions of the area, such as (0.08, 1.0)")
        if not _is_range(self.ratio):
            raise UserError(f"ratio={self.ratio!r} must be two aspect ratios, such as (0.75, 1.33)")

    def box(self, width: int, height: int, rng: Random) -> Box:
        """Draw a part that fits; after ten misses (a very long image), the largest centred part within `ratio`."""
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(*map(math.log, self.ratio)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = rng.randint(0, width - w), rng.randint(0, height - h)
                return left, top, left + w, top + h
        low, high = self.ratio
        return _centred(width, height, min(width, height * high), min(height, width / low))


def centre_box(width: int, height: int, zoom: float) -> Box:
    """The centred square whose side is `zoom` times the shorter side."""
    side = zoom * min(width, height)
    return _centred(width, height, side, side)


def decode(path: Path) -> Image:
    """Read an image file as RGB; 16-bit grey is reduced to 8 bits."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode in ("I", "F"):
                raise ValueError(f"mode {image.mode}, 32 bits per pixel of unknown range; save it with 8 or 16")
            if image.mode.startswith("I;16"):  # `convert` would clip it at 255
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"there is no image {path.name} in {path.parent.absolute()}") from None
    except Exception as error:  # decoders raise almost anything on a damaged file
        why = " ".join(f"{type(error).__name__}: {str(error)[:120]}".split())
        raise UserError(f"{path.absolute()} cannot be read as an image ({why})") from None


def crop(image: Image, box: Box, size: int, flip: bool = False) -> Tensor:
    """The part of the image in `box`, resized by bilinear filtering to uint8 [3, size, size]."""
    from PIL.Image import Resampling

    pixels = np.array(image.resize((size, size), Resampling.BILINEAR, box=box))
    if flip:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _centred(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _is_range(values: Sequence[float]) -> bool:
    return len(values) == 2 and 0 < values[0] <= values[1]
