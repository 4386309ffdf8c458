"""Topologies that never change."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.errors import UserError
from equipoise.topology.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class Static(Algorithm):
    """A random mask, fixed for all of training."""


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm):
    """No mask at all: the baseline that the sparse runs are compared with."""

    sparsity: float = 0.0
    distribution: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity != 0:
            raise UserError(f'sparsity={self.sparsity}: topology "dense" has none; "static" is a fixed sparse one')
