"""One seed for a run, and from it an independent one for every purpose."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import SupportsIndex

import torch


def derive(seed: SupportsIndex, *purpose: str | SupportsIndex) -> int:
    """A 63-bit seed for a purpose such as `derive(seed, "flips", epoch)`.

    It is a hash, so it is the same on every machine and in every version, nearby seeds and epochs are
    unrelated, and no generator state has to be saved to come back to it.
    """
    parts = [part if isinstance(part, str) else int(operator.index(part)) for part in (seed, *purpose)]
    # JSON keeps ("a", "b") apart from ("a/b",) and 1 apart from "1".
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: SupportsIndex, *purpose: str | SupportsIndex) -> torch.Generator:
    """A fresh CPU generator for a purpose; on the CPU so that every device sees the same draws."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
