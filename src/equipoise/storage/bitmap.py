"""One bit per place of a weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pack_bits(flags: Tensor) -> Tensor:
    """A vector of booleans as bytes, the first place in the highest bit."""
    return torch.from_numpy(np.packbits(flags.numpy()))


def get_bits(packed: Tensor, size: int, places: Tensor | None = None) -> Tensor:
    """The flags of all places, or of some."""
    if places is None:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=size).view(np.bool_))
    places = places.long()
    return (packed[places >> 3] >> (7 - (places & 7)).to(torch.uint8)).bitwise_and_(1).bool()


def set_bits(packed: Tensor, places: Tensor) -> None:
    """Raise the flags of some places, each named once or more."""
    bits, where = packed.numpy(), places.numpy()
    np.bitwise_or.at(bits, where >> 3, (128 >> (where & 7)).astype(np.uint8))
