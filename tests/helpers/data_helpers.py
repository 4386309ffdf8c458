"""Small datasets in the layouts of CIFAR, SVHN and image folders, and a comparison of batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CIFAR10_BATCHES = [f"data_batch_{k}" for k in range(1, 6)]


def cifar_rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def dump(path: Path, content: Any, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))


def write_cifar10(root: Path, count: int = 4) -> Path:
    folder = root / "cifar-10-batches-py"
    for k, name in enumerate([*CIFAR10_BATCHES, "test_batch"]):
        dump(folder / name, {b"data": cifar_rows(count, k), b"labels": [(k + n) % 10 for n in range(count)]})
    dump(folder / "batches.meta", {b"label_names": [f"class {n}".encode() for n in range(10)]})
    return folder


def write_cifar100(root: Path, count: int = 20) -> Path:
    folder = root / "cifar-100-python"
    for k, name in enumerate(["train", "test"]):
        dump(folder / name, {b"data": cifar_rows(count, k), b"fine_labels": list(range(80, 80 + count))})
    dump(folder / "meta", {b"fine_label_names": [f"class {n}".encode() for n in range(100)]})
    return folder


def svhn_content(count: int, seed: int) -> dict[str, np.ndarray]:
    """The variables of an official .mat file: images last, labels 1..10 in a column."""
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
    return {"X": pixels, "y": (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]}


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
