"""What a dataset is: images in memory or in a folder, and their splits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data.checks import require_whole
from equipoise.errors import UserError
from equipoise.seeds import generator


@dataclass(frozen=True, eq=False)
class Images:
    """A dataset in memory: `images` uint8 [N, C, H, W] and `labels` int64 [N]."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or 0 in self.images.shape[1:]:
            raise UserError(f"images must be uint8 [N, C, H, W], not {_describe(self.images)}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise UserError(f"labels must be int64 [{len(self.images)}], not {_describe(self.labels)}")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: Tensor) -> Images:
        """The images with these numbers, in this order."""
        return Images(self.images[chosen], self.labels[chosen])

    def to(self, device: str | torch.device) -> Images:
        """The same images on `device`; nothing is copied when they are there already."""
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Folder:
    """A dataset of image files: `names` below `root`, and `labels` int64 [N].

    The names are one numpy array rather than a list, so that worker processes share its memory.
    """

    root: Path
    names: NDArray[np.str_]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: Tensor) -> Folder:
        """The files with these numbers, in this order."""
        return Folder(self.root, self.names[chosen.numpy()], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class Splits:
    """The parts of a dataset, the names of its classes, and the channel statistics of its training images."""

    train: Images | Folder
    validation: Images | Folder | None
    test: Images | Folder
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def hold_out(self, count: int, seed: int) -> Splits:
        """The same splits with `count` training images, chosen by `seed`, held out for validation."""
        require_whole("validation", count, 1)
        if self.validation is not None:
            raise UserError(f"validation={count}: the data has validation images of its own; leave it out")
        total = len(self.train)
        if count >= total:
            raise UserError(f"validation={count} leaves none of the {total} training images to train on")
        order = torch.randperm(total, generator=generator(seed, "validation"))
        # Sorted: the split says which images, not in which order.
        held_out, kept = order[:count].sort().values, order[count:].sort().values
        return replace(self, train=self.train.subset(kept), validation=self.train.subset(held_out))


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def statistics(images: Images) -> Statistics:
    """Mean and (population) standard deviation of each channel over all pixels, scaled to [0, 1]."""
    if len(images) == 0:
        raise UserError("no images to take the mean and standard deviation of")
    channels = images.images.shape[1]
    total = torch.zeros(2, channels, dtype=torch.float64)
    for chunk in images.images.split(1024):  # in chunks: int32 pixels take four times the room
        pixels = chunk.to(torch.int32)
        total += torch.stack([(pixels**power).sum(dim=(0, 2, 3)) for power in (1, 2)]).cpu()
    mean, square = total / (images.images.numel() // channels)
    std = (square - mean**2).clamp(min=0).sqrt()
    return Statistics(tuple((mean / 255).tolist()), tuple((std / 255).tolist()))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
