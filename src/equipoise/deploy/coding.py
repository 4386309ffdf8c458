"""Code a sparse weight in few bytes: the indices of its nonzeros, and their values in float32, bf16 or int8.

Indices are those of blocks of outputs x inputs at one position of a kernel; a block of an unstructured weight is one
weight. They are coded as gaps between blocks with a nonzero, or as a bitmap of all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError
from equipoise.runtime.indices import INDICES, decode_indices, divides, encode_gaps
from equipoise.storage.bitmap import pack_bits
from equipoise.topology.pattern import Block

PARTS = {"values", "scale", *INDICES}
VALUES: Catalogue[torch.dtype] = Catalogue(
    "type of values", {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
)
LARGEST_INT8 = 127


def encode(weight: Tensor, values: str = "float32", gaps_only: bool = False) -> dict[str, Tensor]:
    """Code a weight.

    Args:
        weight: The dense weight.
        values: Type of the values: `float32`, `bf16`, or `int8`, which is symmetric with one scale per output
            channel, max|w| / 127.
        gaps_only: Whether to use neither bitmaps nor blocks.

    Returns:
        `values` of the active blocks, in the order of outputs and inputs; `gaps` between active blocks or a `bitmap` of
        all blocks, whichever takes fewer bytes; `block`, the outputs and inputs of a block if it has several weights;
        and `scale` for int8. If indices would take more bytes than they save, all values and no indices.
    """
    flat, scale = _round(weight.detach().to("cpu", torch.float32), VALUES[values])
    rounded = flat.view(weight.shape)
    best = _in_blocks(rounded, (1, 1), gaps_only)
    block = (1, 1)
    while not gaps_only:
        larger = [
            size for size in ((2 * block[0], block[1]), (block[0], 2 * block[1])) if divides(size, weight.shape)
        ]
        coded = [(_in_blocks(rounded, size), size) for size in larger]
        better = [(parts, size) for parts, size in coded if _bytes(parts) < _bytes(best)]
        if not better:
            break
        best, block = min(better, key=lambda pair: _bytes(pair[0]))
    parts = best if _bytes(best) < flat.nbytes else {"values": flat}
    return parts if scale is None else {**parts, "scale": scale}


def _in_blocks(weight: Tensor, block: tuple[int, int], gaps_only: bool = False) -> dict[str, Tensor]:
    """Values and indices of the blocks that have a nonzero."""
    units = _units(weight, block)
    active = (units != 0).any(1)
    index = active.nonzero().flatten()
    gaps, bitmap = torch.from_numpy(encode_gaps(index.numpy())), pack_bits(active)
    parts = {"values": units[index].flatten()}
    parts |= {"gaps": gaps} if gaps_only or gaps.nbytes <= bitmap.nbytes else {"bitmap": bitmap}
    return parts if block == (1, 1) else {**parts, "block": torch.tensor(block, dtype=torch.int32)}


def _units(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """The elements of a tensor as (blocks, elements of a block)."""
    return tensor.reshape(-1, 1) if block == (1, 1) else Block(*block).arrange(tensor)[0]


def _bytes(parts: Mapping[str, Tensor]) -> int:
    return sum(part.nbytes for part in parts.values())


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
    values, scale = parts.get("values"), parts.get("scale")
    if values is None or values.dim() != 1 or values.dtype not in VALUES.values() or set(parts) - PARTS:
        raise UserError("its values must be a vector of float32, bf16 or int8")
    if (scale is None) != (values.dtype is not torch.int8):
        raise UserError("int8 values have a scale, other values have none")
    count = math.prod(shape)
    flat = values.float()
    coded = {part: _array(parts[part]) for part in INDICES if part in parts}
    if coded:
        index = torch.from_numpy(decode_indices(coded, shape, values.numel()))
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


def _array(part: Tensor) -> NDArray[Any]:
    """The numbers of a tensor; numpy has no bf16, which indices do not have either."""
    return part.float().numpy() if part.dtype is torch.bfloat16 else part.numpy()


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
