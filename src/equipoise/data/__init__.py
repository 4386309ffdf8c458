"""Datasets by name, and loaders whose epochs are reproducible in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from equipoise.catalogue import Catalogue
from equipoise.data.augment import Augment
from equipoise.data.cifar import read_cifar10, read_cifar100
from equipoise.data.dataset import Folder, Images, Splits, Statistics, statistics
from equipoise.data.digits import read_digits
from equipoise.data.folder_loader import FolderLoader
from equipoise.data.image_files import ResizedCrop
from equipoise.data.image_folder import read_folder, read_imagenet
from equipoise.data.loader import Loader
from equipoise.data.svhn import read_svhn
from equipoise.errors import UserError

__all__ = [
    "DATASETS",
    "Augment",
    "Folder",
    "FolderLoader",
    "Images",
    "Loader",
    "ResizedCrop",
    "Splits",
    "Statistics",
    "load",
    "statistics",
]

DATASETS: Catalogue[Callable[..., Splits]] = Catalogue(
    "dataset",
    {
        "digits": read_digits,
        "cifar10": read_cifar10,
        "cifar100": read_cifar100,
        "svhn": read_svhn,
        "imagenet": read_imagenet,
        "folder": read_folder,
    },
    group="data",
)


def load(
    name: str, root: str | Path = "data", validation: int = 0, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Splits:
    """Read a dataset.

    Args:
        name: A name from `DATASETS`.
        root: Folder that holds the dataset's files.
        validation: Number of training images to hold out; ITOP holds out 5,000 of CIFAR's 50,000.
        seed: Selects the held-out images.
        options: Options of the dataset besides `root`.
    """
    splits = DATASETS[name](Path(root), **(options or {}))
    if not isinstance(splits, Splits):
        raise UserError(f'the dataset "{name}" returned {type(splits).__name__}, not equipoise.data.Splits')
    return splits.hold_out(validation, seed) if validation else splits
