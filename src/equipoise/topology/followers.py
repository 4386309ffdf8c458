"""Tensors that follow the weights outside the optimizer."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor, nn


class Follower(Protocol):
    """Keeps one number for each weight outside the optimizer, such as a weight average."""

    def tensor_of(self, stepped: nn.Parameter) -> Tensor | None:
        """The tensor that follows one that the optimizer steps; `None` if there is none."""
        ...


class Followers:
    """The followers of a topology. They are not kept alive, and a copy of a topology has none until they join."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Follower] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return Followers, ()

    def add(self, follower: Follower) -> None:
        """Add a follower."""
        self._members.add(follower)

    def of(self, stepped: nn.Parameter) -> list[Tensor]:
        """The tensors that follow one that the optimizer steps."""
        found = [follower.tensor_of(stepped) for follower in self._members]
        return [tensor for tensor in found if tensor is not None]
