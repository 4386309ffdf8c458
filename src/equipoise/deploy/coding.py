"""A sparse weight as few bytes: the gaps between its nonzeros, and their values in float32, bf16 or int8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError

VALUES: Catalogue[torch.dtype] = Catalogue(
    "type of values", {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
)
GAP_TYPES = (np.uint8, np.uint16)
LARGEST_INT8 = 127


def encode(weight: Tensor, values: str = "float32") -> dict[str, Tensor]:
    """The parts of a weight: `values` of its nonzeros in flat order, `gaps` between them, `scale` for int8.

    int8 values are symmetric with one scale per output channel, max|w| / 127. Where gaps would not pay, all values
    are stored and there are no `gaps`.
    """
    flat, scale = _round(weight.detach().to("cpu", torch.float32), VALUES[values])
    index = flat.nonzero().flatten()
    gaps = encode_gaps(index.numpy())
    if gaps.nbytes + index.numel() * flat.itemsize < flat.nbytes:
        parts = {"values": flat[index], "gaps": torch.from_numpy(gaps)}
    else:
        parts = {"values": flat}
    return parts if scale is None else {**parts, "scale": scale}


def _round(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weight in another type, flat, and for int8 the scale of each row."""
    if dtype is not torch.int8:
        return weight.flatten().to(dtype), None
    rows = weight.flatten(1)
    scale = rows.abs().amax(1) / LARGEST_INT8
    steps = rows / torch.where(scale > 0, scale, 1)[:, None]
    return steps.round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8).flatten(), scale


def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The dense float32 weight of this shape; parts that do not fit it are refused."""
    values, gaps, scale = parts.get("values"), parts.get("gaps"), parts.get("scale")
    if values is None or values.dim() != 1 or values.dtype not in VALUES.values() or set(parts) - _PARTS:
        raise UserError("its values are not a vector of float32, bf16 or int8")
    if (scale is None) != (values.dtype is not torch.int8):
        raise UserError("int8 values have a scale, and no others")
    count = math.prod(shape)
    flat = values.float()
    if gaps is not None:
        index = torch.from_numpy(_places(gaps, values.numel(), count))
        flat = torch.zeros(count).index_put_((index,), flat)
    if flat.numel() != count:
        raise UserError(f"it has {flat.numel()} values for {count} weights")
    weight = flat.view(shape)
    if scale is not None:
        if scale.dtype is not torch.float32 or scale.shape != shape[:1]:
            raise UserError(f"its scale is not one float32 for each of {shape[0]} output channels")
        weight = weight * scale.view(-1, *[1] * (len(shape) - 1))
    if not weight.isfinite().all():
        raise UserError("it has values that are not finite")
    return weight


_PARTS = {"values", "gaps", "scale"}


def _places(gaps: Tensor, values: int, count: int) -> NDArray[np.int64]:
    if gaps.dim() != 1 or gaps.dtype not in (torch.uint8, torch.uint16):
        raise UserError("its gaps are not a vector of uint8 or uint16")
    index = decode_gaps(gaps.numpy())
    if len(index) != values:
        raise UserError(f"it has {len(index)} places for {values} values")
    if len(index) and index[-1] >= count:  # ascending, so the last is the largest
        raise UserError(f"it has a value at place {index[-1]} of {count}")
    return index


def encode_gaps(index: NDArray[np.int64]) -> NDArray[Any]:
    """Ascending places as the number of zeros before each, in uint8 or uint16, whichever is smaller.

    The type's largest number stands for so many zeros with no value after them; longer gaps repeat it.
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
    """The places that `encode_gaps` coded; whatever the codes are, they come out ascending."""
    ends = codes != np.iinfo(codes.dtype).max
    if len(codes) and not ends[-1]:
        raise UserError("its gaps end without a value")
    zeros = np.cumsum(codes, dtype=np.int64)[ends]
    return zeros + np.arange(len(zeros))
