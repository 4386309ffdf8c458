"""Batches and states, which are tensors in nested containers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_tuple(batch: Any) -> tuple[Any, ...]:
    """What a loader gives for one batch, as arguments; a single tensor is one argument."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def copied(value: Any, device: torch.device) -> Any:
    """Nested containers with every tensor copied to the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: copied(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item, device) for item in value)
    return value
