"""The origin of a dataset's files, and one-line errors for missing or damaged ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise.errors import UserError


@dataclass(frozen=True)
class DatasetSource:
    """A dataset's name and the origin of its files, as quoted in error messages."""

    name: str
    origin: str

    def require(self, paths: Iterable[Path]) -> None:
        """Raise for the first path that is not a file; call it before slow reading starts."""
        for path in paths:
            if not os.path.isfile(path):  # unlike Path.is_file, False for every invalid path
                raise self.missing(path)

    def missing(self, path: Path) -> UserError:
        """Error for a missing file or folder."""
        return _one_line(f"{self.name}: no {path.name} in {path.parent.absolute()}; it comes from {self.origin}")

    def damaged(self, path: Path, why: str) -> UserError:
        """Error for a file or folder with unexpected content."""
        return _one_line(
            f"{self.name}: {path.name} in {path.parent.absolute()} {why}; a good copy comes from {self.origin}"
        )

    def unreadable(self, path: Path, kind: str, error: Exception) -> UserError:
        """Error for a file whose reader raised `error`."""
        return self.damaged(path, f"cannot be read as {kind} ({type(error).__name__}: {str(error)[:120]})")

    def labels(self, path: Path, values: Tensor, images: int, classes: int, first: int = 0) -> Tensor:
        """Check that there is one label per image, in `first`..`first + classes - 1`; return them as int64."""
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
