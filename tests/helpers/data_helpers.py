"""Image folders and comparisons for the tests of loaders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CLASSES = ("ant", "bee", "cat")


def write_image_folder(root: Path, parts: tuple[str, ...] = ("train", "val"), each: int = 5) -> Path:
    """Write `each` random images of every class, half of them PNG and half JPEG, as ROOT/PART/CLASS/*."""
    rng = np.random.default_rng(0)
    for part in parts:
        for name in CLASSES:
            folder = root / part / name
            folder.mkdir(parents=True)
            for n in range(each):
                width, height = rng.integers(20, 60, 2)
                pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{n}.{'png' if n % 2 else 'JPEG'}")
    return root


def same(first: Iterable[tuple[Tensor, Tensor]], second: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether two sequences of batches are bit-equal."""
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))
