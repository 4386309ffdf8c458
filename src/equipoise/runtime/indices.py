"""Indices of the nonzeros of a weight in few bytes: gaps between active blocks, or a bitmap of all blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import UserError

INDICES = ("gaps", "bitmap", "block")
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


def divides(block: tuple[int, int], shape: Sequence[int]) -> bool:
    """Return whether a weight of this shape consists of whole blocks."""
    return shape[0] % block[0] == 0 and shape[1] % block[1] == 0


def decode_indices(parts: Mapping[str, NDArray[Any]], shape: Sequence[int], values: int) -> NDArray[np.int64]:
    """Return the flat indices of the values of a weight, in the order of the values.

    Args:
        parts: `gaps` between active blocks or a `bitmap` of all blocks, and `block`, outputs and inputs of a block.
        shape: Shape of the weight.
        values: Number of values.

    Raises:
        UserError: If the parts are not those of such a weight.
    """
    (high, wide), taps = _block(parts, shape), math.prod(shape[2:])
    elements, columns = high * wide, shape[1] // wide
    units = _active(parts, math.prod(shape) // elements, values, elements)
    block, tap = np.divmod(units, taps)
    row, column = np.divmod(block, columns)
    outputs = (row[:, None] * high + np.arange(high))[:, :, None]
    inputs = (column[:, None] * wide + np.arange(wide))[:, None, :]
    return ((outputs * shape[1] + inputs) * taps + tap[:, None, None]).ravel()


def _block(parts: Mapping[str, NDArray[Any]], shape: Sequence[int]) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    if "block" not in parts:
        return 1, 1
    block = parts["block"]
    if block.shape != (2,) or block.dtype != np.int32 or block.min() < 1 or block.max() == 1:
        raise UserError("its block must be two int32, outputs and inputs")
    outputs, inputs = block.tolist()
    if not divides((outputs, inputs), shape):
        raise UserError(
            f"it has blocks of {outputs}x{inputs} in a weight of {shape[0]} outputs and {shape[1]} inputs"
        )
    return outputs, inputs


def _active(parts: Mapping[str, NDArray[Any]], count: int, values: int, elements: int) -> NDArray[np.int64]:
    """Ascending indices of the blocks that have values."""
    if ("gaps" in parts) == ("bitmap" in parts):
        raise UserError("its indices must be either gaps or a bitmap")
    index = _from_gaps(parts["gaps"], count) if "gaps" in parts else _from_bitmap(parts["bitmap"], count)
    if len(index) * elements != values:
        raise UserError(f"it has {len(index)} indices for {values} values")
    return index


def _from_gaps(gaps: NDArray[Any], count: int) -> NDArray[np.int64]:
    if gaps.ndim != 1 or gaps.dtype not in GAP_TYPES:
        raise UserError("its gaps must be a vector of uint8 or uint16")
    index = decode_gaps(gaps)
    if len(index) and index[-1] >= count:  # ascending, so the last is the largest
        raise UserError(f"it has a value at index {index[-1]} of {count}")
    return index


def _from_bitmap(bitmap: NDArray[Any], count: int) -> NDArray[np.int64]:
    if bitmap.dtype != np.uint8 or bitmap.shape != (-(-count // 8),):
        raise UserError(f"its bitmap must have {-(-count // 8)} bytes for {count} blocks")
    return np.flatnonzero(np.unpackbits(bitmap, count=count))
