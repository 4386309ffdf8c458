"""Files of tensors in the format of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors to a file.

    The `save_file` of safetensors writes to a temporary file with a name of its own first, which stays in the folder if
    the process is killed.
    """
    path.write_bytes(save(dict(tensors), metadata=metadata))
