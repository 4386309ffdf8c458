"""Datasets by name, and loaders whose epochs are reproducible in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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

DATASETS: Catalogue[Callable[[Path], Splits]] = Catalogue(
    "dataset",
    {
        "digits": read_digits,
        "cifar10": read_cifar10,
        "cifar100": read_cifar100,
        "svhn": read_svhn,
        "imagenet": read_imagenet,
        "folder": read_folder,
    },
)


def load(name: str, root: str | Path = "data", validation: int = 0, seed: int = 0) -> Splits:
    """Read a dataset.

    Args:
        name: A name from `DATASETS`.
        root: Folder that holds the dataset's files.
        validation: Number of training images to hold out; ITOP holds out 5,000 of CIFAR's 50,000.
        seed: Selects the held-out images.
    """
    splits = DATASETS[name](Path(root))
    return splits.hold_out(validation, seed) if validation else splits
