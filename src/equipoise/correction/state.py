"""State that checkpoints save: tensors and numbers in nested containers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Stateful:
    """Base of objects whose state is the attributes named in `saved`."""

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])


def copy_state(value: Any, device: torch.device) -> Any:
    """Copy nested containers and every tensor in them to the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: copy_state(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_state(item, device) for item in value)
    return value
