"""The gaps between the nonzeros of a weight, in one or two bytes each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError

GAP_TYPES = (np.uint8, np.uint16)


def encode_gaps(index: NDArray[np.int64]) -> NDArray[Any]:
    """Code ascending indices as the number of zeros before each, in uint8 or uint16, whichever takes fewer bytes.

    The largest number of the type stands for that number of zeros with no value after them. Longer gaps repeat it.
    """
    gaps = np.diff(index, prepend=-1) - 1
    return min((_escape(gaps, kind) for kind in GAP_TYPES), key=lambda codes: codes.nbytes)


def _escape(gaps: NDArray[np.int64], kind: type[np.uint8] | type[np.uint16]) -> NDArray[Any]:
    escapes, rest = np.divmod(gaps, np.iinfo(kind).max)
    ends = np.cumsum(escapes + 1)
    codes = np.full(ends[-1] if len(ends) else 0, np.iinfo(kind).max, kind)
    codes[ends - 1] = rest
    return codes


def decode_gaps(codes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the indices that `encode_gaps` coded; any codes give ascending indices.

    Raises:
        UserError: If the codes end without a value.
    """
    ends = codes != np.iinfo(codes.dtype).max
    if len(codes) and not ends[-1]:
        raise UserError("its gaps end without a value")
    zeros = np.cumsum(codes, dtype=np.int64)[ends]
    return zeros + np.arange(len(zeros))


def indices(codes: NDArray[Any], values: int, count: int) -> NDArray[np.int64]:
    """Return the indices that codes stand for, one for each of `values` numbers, all below `count`.

    Raises:
        UserError: If there are more or fewer indices, or larger ones.
    """
    index = decode_gaps(codes)
    if len(index) != values:
        raise UserError(f"it has {len(index)} indices for {values} values")
    if len(index) and index[-1] >= count:  # ascending, so the last is the largest
        raise UserError(f"it has a value at index {index[-1]} of {count}")
    return index
