"""Topologies that never change."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.topology.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class Static(Algorithm):
    """A random mask, fixed for all of training."""


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm):
    """No mask at all: the baseline that the sparse runs are compared with."""

    sparsity: float = field(default=0.0, init=False)
    distribution: str = "uniform"
