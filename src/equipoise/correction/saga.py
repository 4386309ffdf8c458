"""SAGA over batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equipoise.correction.estimator import Estimator, Way
from equipoise.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SAGA(Estimator):
    """SAGA (Defazio et al. 2014) with a batch as the unit: g = g_new - (g_i - mean of all g), g_i as last seen.

    The batches keep their images through training (the order changes), and the table holds one gradient on the
    active weights for each: no pass beyond SGD's. The first epoch fills the table and is not corrected.
    """

    fixed_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coefficient == "loss":
            raise UserError("SAGA has no old weights to compare losses at; coefficient is fixed, gradient or linear")

    @property
    def source(self) -> Way:
        return "table"
