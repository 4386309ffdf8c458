"""Street View House Numbers, cropped digits (Netzer et al., 2011), from the official .mat files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from equipoise.data.dataset import Images, Splits
from equipoise.data.dataset_source import DatasetSource

SOURCE = DatasetSource("SVHN", "http://ufldl.stanford.edu/housenumbers (format 2, cropped digits)")
MEAN = (0.4377, 0.4438, 0.4728)
STD = (0.1980, 0.2010, 0.1970)


def read_svhn(root: Path) -> Splits:
    """SVHN cropped digits, 3x32x32 in 10 classes, 73,257 + 26,032 images, from ROOT/*_32x32.mat."""
    paths = [root / f"{split}_32x32.mat" for split in ("train", "test")]
    SOURCE.require(paths)
    train, test = (_images(path) for path in paths)
    return Splits(train, None, test, tuple("0123456789"), MEAN, STD)


def _images(path: Path) -> Images:
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # scipy raises almost anything on a damaged file
        raise SOURCE.unreadable(path, "a MATLAB file", error) from None
    pixels, digits = content.get("X"), content.get("y")
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.ndim == 4
        and pixels.shape[:3] == (32, 32, 3)
    ):
        raise SOURCE.damaged(path, 'has no uint8 images [32, 32, 3, N] under "X"')
    if not (isinstance(digits, np.ndarray) and digits.dtype.kind in "iu"):
        raise SOURCE.damaged(path, 'has no integer labels under "y"')
    labels = torch.from_numpy(digits.astype(np.int64).reshape(-1))
    labels = SOURCE.labels(path, labels, pixels.shape[3], classes=10, first=1)
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    return Images(images, labels % 10)  # the files label the digit zero as 10
