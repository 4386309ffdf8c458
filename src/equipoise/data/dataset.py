"""Datasets: images in memory or in a folder, their splits and channel statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.seeds import generator


@dataclass(frozen=True, eq=False)
class Images:
    """A dataset in memory.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
    """

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
        """The images with the given indices, in that order."""
        return Images(self.images[chosen], self.labels[chosen])

    def to(self, device: str | torch.device) -> Images:
        """The same images on `device`; they are not copied if they are there already."""
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Folder:
    """A dataset of image files.

    Args:
        root: Folder that the names are relative to.
        names: File names, in one numpy array so that worker processes share its memory.
        labels: int64 [N].
    """

    root: Path
    names: NDArray[np.str_]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: Tensor) -> Folder:
        """The files with the given indices, in that order."""
        return Folder(self.root, self.names[chosen.numpy()], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class Splits:
    """The splits of a dataset.

    Args:
        train: Training images.
        validation: Validation images; `None` if the dataset has none.
        test: Test images.
        classes: Class names, by label.
        mean: Channel means of the training images, of pixels in [0, 1].
        std: Channel standard deviations.
    """

    train: Images | Folder
    validation: Images | Folder | None
    test: Images | Folder
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def hold_out(self, count: int, seed: int) -> Splits:
        """Move `count` training images, selected by `seed`, to the validation split."""
        require_whole(validation=count)
        if self.validation is not None:
            raise UserError(f"validation={count}: the dataset has a validation split already; remove this option")
        total = len(self.train)
        if count >= total:
            raise UserError(f"validation={count} leaves none of the {total} training images")
        order = torch.randperm(total, generator=generator(seed, "validation"))
        # Sorted, so that the split does not change the order of the images.
        held_out, kept = order[:count].sort().values, order[count:].sort().values
        return replace(self, train=self.train.subset(kept), validation=self.train.subset(held_out))


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def statistics(images: Images) -> Statistics:
    """Channel statistics over all pixels, scaled to [0, 1]; the standard deviation divides by the number of pixels."""
    if len(images) == 0:
        raise UserError("channel statistics need at least one image")
    channels = images.images.shape[1]
    total = torch.zeros(2, channels, dtype=torch.float64)
    for chunk in images.images.split(1024):  # in chunks: int32 pixels take four times the memory
        pixels = chunk.to(torch.int32)
        total += torch.stack([(pixels**power).sum(dim=(0, 2, 3)) for power in (1, 2)]).cpu()
    mean, square = total / (images.images.numel() // channels)
    std = (square - mean**2).clamp(min=0).sqrt()
    return Statistics(tuple((mean / 255).tolist()), tuple((std / 255).tolist()))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
