"""Topologies that never change."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.topology.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class Static(Algorithm):
    """A random mask that stays fixed during training."""


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm):
    """No mask: the dense baseline of sparse runs."""

    sparsity: float = field(default=0.0, init=False)
    distribution: str = "uniform"
