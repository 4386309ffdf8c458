"""Code a sparse weight in few bytes: the gaps between its nonzeros, and their values in float32, bf16 or int8."""

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

PARTS = {"values", "gaps", "scale"}
VALUES: Catalogue[torch.dtype] = Catalogue(
    "type of values", {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
)
GAP_TYPES = (np.uint8, np.uint16)
LARGEST_INT8 = 127


def encode(weight: Tensor, values: str = "float32") -> dict[str, Tensor]:
    """Code a weight.

    Args:
        weight: The dense weight.
        values: Type of the values: `float32`, `bf16`, or `int8`, which is symmetric with one scale per output
            channel, max|w| / 127.

    Returns:
        `values` of the nonzeros in flat order, `gaps` between them, and `scale` for int8. If gaps would take more
        bytes than they save, all values and no `gaps`.
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
    """The flat weight in another type, and for int8 the scale of each row."""
    if dtype is not torch.int8:
        return weight.flatten().to(dtype), None
    rows = weight.flatten(1)
    scale = rows.abs().amax(1) / LARGEST_INT8
    steps = rows / torch.where(scale > 0, scale, 1)[:, None]
    return steps.round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8).flatten(), scale


def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the dense float32 weight that `encode` coded.

    Raises:
        UserError: If the parts are not those of a weight of this shape.
    """
    values, gaps, scale = parts.get("values"), parts.get("gaps"), parts.get("scale")
    if values is None or values.dim() != 1 or values.dtype not in VALUES.values() or set(parts) - PARTS:
        raise UserError("its values must be a vector of float32, bf16 or int8")
    if (scale is None) != (values.dtype is not torch.int8):
        raise UserError("int8 values have a scale, other values have none")
    count = math.prod(shape)
    flat = values.float()
    if gaps is not None:
        index = torch.from_numpy(_indices(gaps, values.numel(), count))
        flat = torch.zeros(count).index_put_((index,), flat)
    if flat.numel() != count:
        raise UserError(f"it has {flat.numel()} values for {count} weights")
    weight = flat.view(shape)
    if scale is not None:
        if scale.dtype is not torch.float32 or scale.shape != shape[:1]:
            raise UserError(f"its scale must be one float32 for each of {shape[0]} output channels")
        weight = weight * scale.view(-1, *[1] * (len(shape) - 1))
    if not weight.isfinite().all():
        raise UserError("it has values that are not finite")
    return weight


def decode_all(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors of a model from those of a file.

    Args:
        tensors: Tensors stored as they are, by name, and the parts of coded weights as `NAME/PART`.
        shapes: Shapes of the model's tensors, by name.

    Raises:
        UserError: If there are parts of a weight that the model does not have, or that do not fit it.
    """
    found: dict[str, Tensor] = {}
    coded: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        if name and key not in shapes:  # the name of a module may contain a slash
            coded.setdefault(name, {})[part] = tensor
        else:
            found[key] = tensor
    for name, parts in coded.items():
        if len(shapes.get(name, ())) < 2:
            raise UserError(f'the model has no weight "{name}"')
        try:
            found[name] = decode(parts, shapes[name])
        except UserError as error:
            raise UserError(f'"{name}": {error}') from None
    return found


def _indices(gaps: Tensor, values: int, count: int) -> NDArray[np.int64]:
    if gaps.dim() != 1 or gaps.dtype not in (torch.uint8, torch.uint16):
        raise UserError("its gaps must be a vector of uint8 or uint16")
    index = decode_gaps(gaps.numpy())
    if len(index) != values:
        raise UserError(f"it has {len(index)} indices for {values} values")
    if len(index) and index[-1] >= count:  # ascending, so the last is the largest
        raise UserError(f"it has a value at index {index[-1]} of {count}")
    return index


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
