"""One seed for a run, and an independent seed derived from it for every purpose."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import SupportsIndex

import torch


def derive(seed: SupportsIndex, *purpose: str | SupportsIndex) -> int:
    """Return a 63-bit seed for a purpose, such as `derive(seed, "flips", epoch)`.

    The seed is a hash of its arguments. It is the same on every machine and in every version, nearby seeds and epochs
    give unrelated values, and no generator state has to be saved.
    """
    parts = [part if isinstance(part, str) else int(operator.index(part)) for part in (seed, *purpose)]
    # JSON tells ("a", "b") from ("a/b",) and 1 from "1".
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: SupportsIndex, *purpose: str | SupportsIndex) -> torch.Generator:
    """Return a new generator for a purpose. It is on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
