"""State that checkpoints save: tensors and numbers in nested containers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import UserError

Check = Callable[[Any], bool]


def count(value: Any) -> bool:
    """Whether a value is a number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def tensor(*shape: int) -> Check:
    """Whether a value is a floating tensor of this shape; -1 stands for any length."""

    def fits(value: Any) -> bool:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != len(shape):
            return False
        return all(want in (-1, have) for want, have in zip(shape, value.shape, strict=True))

    return fits


def optional(check: Check) -> Check:
    """Whether a value is `None` or passes the check."""
    return lambda value: value is None or check(value)


class Stateful:
    """Base of objects whose state is the attributes in `saved`, each with what a loaded value must fulfil."""

    saved: ClassVar[Mapping[str, Check]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, fits in self.saved.items():
            if not fits(state[name]):
                raise UserError(f'the state of the correction has a wrong value of "{name}"')
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
