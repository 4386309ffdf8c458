"""Code a sparse weight in few bytes: the gaps between its nonzeros, and their values in float32, bf16 or int8."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError
from equipoise.runtime.gaps import encode_gaps, indices

PARTS = {"values", "gaps", "scale"}
VALUES: Catalogue[torch.dtype] = Catalogue(
    "type of values", {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
)
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
        if gaps.dim() != 1 or gaps.dtype not in (torch.uint8, torch.uint16):
            raise UserError("its gaps must be a vector of uint8 or uint16")
        index = torch.from_numpy(indices(gaps.numpy(), values.numel(), count))
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
