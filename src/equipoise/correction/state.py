"""Saved states: tensors in nested containers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def copy_state(value: Any, device: torch.device) -> Any:
    """Copy nested containers and every tensor in them to the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: copy_state(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_state(item, device) for item in value)
    return value
