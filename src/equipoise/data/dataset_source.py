"""Where a dataset's files come from, and the one line that says so when one is missing or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise.errors import UserError


@dataclass(frozen=True)
class Source:
    """A dataset's name and where its files come from, as they stand in error messages."""

    name: str
    origin: str

    def require(self, paths: Iterable[Path]) -> None:
        """Raise for the first of `paths` that is not a file; done before the slow reading starts."""
        for path in paths:
            if not os.path.isfile(path):  # unlike Path.is_file, False for every path that cannot be
                raise self.missing(path)

    def missing(self, path: Path) -> UserError:
        """The error for a file or folder that is not there."""
        return _one_line(f"{self.name}: no {path.name} in {path.parent.absolute()}; it comes from {self.origin}")

    def damaged(self, path: Path, why: str) -> UserError:
        """The error for a file or folder that is there and is not what it should be."""
        return _one_line(
            f"{self.name}: {path.name} in {path.parent.absolute()} {why}; a good one comes from {self.origin}"
        )

    def unreadable(self, path: Path, kind: str, error: Exception) -> UserError:
        """The error for a file whose reader failed with `error`."""
        return self.damaged(path, f"cannot be read as {kind} ({type(error).__name__}: {str(error)[:120]})")

    def labels(self, path: Path, values: Tensor, images: int, classes: int, first: int = 0) -> Tensor:
        """`values` as int64, once each image has one, and it is one of `classes` labels counted from `first`."""
        if values.shape != (images,):
            raise self.damaged(path, f"holds {images} images and {values.numel()} labels")
        if images == 0:
            raise self.damaged(path, "holds no images")
        low, high = int(values.min()), int(values.max())
        if low < first or high >= first + classes:
            raise self.damaged(path, f"has labels {low}..{high}, not {first}..{first + classes - 1}")
        return values.to(torch.int64)


def _one_line(message: str) -> UserError:
    return UserError(" ".join(message.split()))
