"""Bitmaps: one flag for each weight of a tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pack_bits(flags: Tensor) -> Tensor:
    """Pack a vector of booleans into bytes, the first flag in the highest bit."""
    return torch.from_numpy(np.packbits(flags.numpy()))


def get_bits(packed: Tensor, size: int, index: Tensor | None = None) -> Tensor:
    """Return the flags at `index`, or all `size` flags."""
    if index is None:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=size).view(np.bool_))
    index = index.long()
    return (packed[index >> 3] >> (7 - (index & 7)).to(torch.uint8)).bitwise_and_(1).bool()


def set_bits(packed: Tensor, index: Tensor) -> None:
    """Set the flags at `index` in place; an index may be repeated."""
    bits, at = packed.numpy(), index.numpy()
    np.bitwise_or.at(bits, at >> 3, (128 >> (at & 7)).astype(np.uint8))
