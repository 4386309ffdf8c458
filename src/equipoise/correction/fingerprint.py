"""Fingerprints of batches, which tell whether a step has the batch that a refresh was given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.errors import UserError

ELEMENTS = 64  # of each tensor that are compared
GOLDEN_RATIO = 0.6180339887498949


class Fingerprint(NamedTuple):
    """A summary of a batch, to recognise it. Devices are not compared: a step may move a batch of the CPU to a GPU.

    Attributes:
        structure: Hash of containers, shapes, types and plain values such as references to batches.
        values: The bytes of a few elements of each tensor, on its device.
    """

    structure: str
    values: list[Tensor]

    @classmethod
    def of(cls, batch: tuple[Any, ...]) -> Fingerprint:
        """Make the fingerprint of a batch; nothing waits for a GPU."""
        values: list[Tensor] = []
        return cls(sha256(_describe(batch, values).encode()).hexdigest(), values)

    @classmethod
    def saved(cls, structure: Any, values: Any) -> Fingerprint:
        """Make a fingerprint from what a checkpoint has, which is checked."""
        bytes_only = isinstance(values, list) and all(
            isinstance(v, Tensor) and v.dtype == torch.uint8 for v in values
        )
        if not isinstance(structure, str) or not bytes_only:
            raise UserError("the state of the correction has a wrong fingerprint of a batch")
        return cls(structure, values)

    def differs(self, other: Fingerprint) -> Tensor:
        """Return whether it belongs to another batch, as a tensor on the device of the values: no GPU is waited for."""
        shapes, others = ([value.shape for value in one.values] for one in (self, other))
        differs = torch.tensor(self.structure != other.structure or shapes != others, device="cpu")
        if not differs:
            for ours, theirs in zip(self.values, other.values, strict=True):
                device = ours.device if theirs.is_cpu else theirs.device
                ours, theirs = (side.to(device, non_blocking=True) for side in (ours, theirs))
                differs = differs | (ours != theirs).any()
        return differs


def _describe(value: Any, values: list[Tensor]) -> str:
    """Describe an argument of a loss function; bytes of its tensors are appended to `values`."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            values.append(_sample(value.detach()))
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_describe(item, values)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_describe(item, values) for item in value)})"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    return type(value).__name__


def _sample(tensor: Tensor) -> Tensor:
    # Bytes, because NaN is not equal to itself.
    few = tensor.flatten().clone() if tensor.numel() <= ELEMENTS else tensor[_indices(tensor.shape, tensor.device)]
    return few.view(torch.uint8)


@lru_cache(maxsize=64)
def _indices(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Spread indices evenly over a tensor; multiples of a stride could all be on the border of the images."""
    fractions = torch.arange(ELEMENTS, dtype=torch.float64, device="cpu") * GOLDEN_RATIO % 1
    return tuple(index.to(device) for index in torch.unravel_index((fractions * shape.numel()).long(), shape))
