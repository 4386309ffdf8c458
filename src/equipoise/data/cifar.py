"""CIFAR-10 and CIFAR-100 from the official Python batches (Krizhevsky, 2009)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.data.dataset import Images, Splits
from equipoise.data.dataset_source import DatasetSource
from equipoise.data.plain_pickle import read_plain_pickle

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ROW = 3 * 32 * 32  # a row holds the red plane, then green, then blue


@dataclass(frozen=True)
class _Layout:
    """File names of one of the two datasets, and keys inside the files."""

    source: DatasetSource
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels_key: str
    names_key: str
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CIFAR10 = _Layout(
    source=DatasetSource("CIFAR-10", f"cifar-10-python.tar.gz at {PAGE}"),
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{k}" for k in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    labels_key="labels",
    names_key="label_names",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_CIFAR100 = _Layout(
    source=DatasetSource("CIFAR-100", f"cifar-100-python.tar.gz at {PAGE}"),
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    labels_key="fine_labels",
    names_key="fine_label_names",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def read_cifar10(root: Path) -> Splits:
    """CIFAR-10, 3x32x32 in 10 classes, 50,000 + 10,000 images, from ROOT/cifar-10-batches-py."""
    return _read(_CIFAR10, root)


def read_cifar100(root: Path) -> Splits:
    """CIFAR-100, 3x32x32 in 100 classes, 50,000 + 10,000 images, from ROOT/cifar-100-python."""
    return _read(_CIFAR100, root)


def _read(layout: _Layout, root: Path) -> Splits:
    folder = root / layout.folder
    layout.source.require(folder / name for name in (*layout.train, layout.test, layout.meta))
    classes = _class_names(layout, folder / layout.meta)
    batches = [_images(layout, folder / name) for name in layout.train]
    train = Images(torch.cat([part.images for part in batches]), torch.cat([part.labels for part in batches]))
    return Splits(train, None, _images(layout, folder / layout.test), classes, layout.mean, layout.std)


def _images(layout: _Layout, path: Path) -> Images:
    content = _content(layout, path)
    data, labels = content.get("data"), content.get(layout.labels_key)
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (ROW,)):
        raise layout.source.damaged(path, f'has no uint8 rows of {ROW} pixels under "data"')
    if not (isinstance(labels, list) and all(type(label) is int and abs(label) < 2**31 for label in labels)):
        raise layout.source.damaged(path, f'has no list of integers under "{layout.labels_key}"')
    images = torch.from_numpy(np.ascontiguousarray(data)).view(-1, 3, 32, 32)
    return Images(images, layout.source.labels(path, torch.tensor(labels), len(images), layout.classes))


def _class_names(layout: _Layout, path: Path) -> tuple[str, ...]:
    names = _content(layout, path).get(layout.names_key)
    if not isinstance(names, list) or len(names) != layout.classes:
        raise layout.source.damaged(path, f'has no list of {layout.classes} names under "{layout.names_key}"')
    return tuple(_text(name) for name in names)


def _content(layout: _Layout, path: Path) -> dict[str, Any]:
    """The dictionary in a batch file, with text keys; files written by Python 2 have bytes."""
    try:
        content = read_plain_pickle(path)
    except Exception as error:
        raise layout.source.unreadable(path, "a pickle of numpy arrays", error) from None
    if not isinstance(content, dict):
        raise layout.source.damaged(path, "holds no dictionary")
    return {_text(key): value for key, value in content.items()}


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
