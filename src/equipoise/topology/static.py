"""Topologies that never change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from equipoise.topology.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class Static(Algorithm):
    """A random mask that stays fixed during training."""

    fixed: ClassVar[bool] = True

    @classmethod
    def from_nonzeros(cls, **options: Any) -> Self:
        """Return the topology of a pruned model: its zeros stay zero, to fine-tune the other weights.

        Args:
            **options: Fields of the algorithm, such as `exclude`.
        """
        return cls(**{"distribution": "nonzeros", **options})


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm):
    """No mask: the dense baseline of sparse runs."""

    sparsity: float = field(default=0.0, init=False)
    distribution: str = "uniform"
    pattern: str = field(default="", init=False)
