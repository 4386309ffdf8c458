"""Datasets of image files in class folders: ImageNet, or any ROOT/train/CLASS/*.jpg."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from equipoise.data.dataset import Folder, Images, Splits, Statistics, statistics
from equipoise.data.dataset_source import DatasetSource
from equipoise.data.image_files import centre_box, crop, decode

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
IMAGENET = DatasetSource(
    "ImageNet", "https://www.image-net.org (ILSVRC 2012, validation images sorted into class folders)"
)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
FOLDER = DatasetSource("image folder", "your own images, laid out as train/CLASS/*.jpg and val/CLASS/*.jpg")


def read_imagenet(root: Path) -> Splits:
    """ImageNet (ILSVRC 2012) from ROOT/imagenet/{train,val}/CLASS/*, decoded in worker processes."""
    root = root / "imagenet"
    classes = _classes(root / "train", IMAGENET)
    train, test = (_listed(root / part, classes, IMAGENET) for part in ("train", "val"))
    return Splits(train, None, test, classes, IMAGENET_MEAN, IMAGENET_STD)


def read_folder(root: Path) -> Splits:
    """Any folder of images, ROOT/train/CLASS/* and ROOT/{val,test}/CLASS/*, decoded in worker processes."""
    # A single folder next to train/ is the test set, whatever its name; if there are two, val/ is for validation.
    others = [part for part in ("val", "test") if os.path.isdir(root / part)] or ["val"]
    classes = _classes(root / "train", FOLDER)
    train = _listed(root / "train", classes, FOLDER)
    *validation, test = (_listed(root / part, classes, FOLDER) for part in others)
    return Splits(train, validation[0] if validation else None, test, classes, *folder_statistics(train))


def folder_statistics(folder: Folder, sample: int = 512, size: int = 224) -> Statistics:
    """Channel statistics of up to `sample` images, evenly spaced over the folder."""
    count = min(sample, len(folder))
    chosen = folder.subset(torch.arange(count) * len(folder) // count)
    images = (decode(folder.root / name) for name in chosen.names)
    squares = [crop(image, centre_box(*image.size, zoom=1), size) for image in images]
    return statistics(Images(torch.stack(squares), chosen.labels))


def _classes(folder: Path, source: DatasetSource) -> tuple[str, ...]:
    """Names of the class folders, sorted; the index of a name is its label."""
    if not os.path.isdir(folder):
        raise source.missing(folder)
    names = [name for name in _visible(folder, source) if os.path.isdir(folder / name)]
    if not names:
        raise source.damaged(folder, "holds no class folders")
    return tuple(names)


def _listed(folder: Path, classes: tuple[str, ...], source: DatasetSource) -> Folder:
    """The images of one split."""
    label_of = {name: label for label, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for name in _classes(folder, source):
        if name not in label_of:
            raise source.damaged(folder, f"has a class {name} that train/ does not have")
        files = [file for file in _visible(folder / name, source) if file.lower().endswith(SUFFIXES)]
        if not files:
            raise source.damaged(folder / name, "holds no images")
        names += [f"{name}/{file}" for file in files]
        labels += [label_of[name]] * len(files)
    return Folder(folder, np.array(names), torch.tensor(labels))


def _visible(folder: Path, source: DatasetSource) -> list[str]:
    """Sorted names in a folder, without hidden ones (such as "._x.jpg" of macOS archives)."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise source.unreadable(folder, "a folder", error) from None
