"""SAGA over batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equipoise.correction.coefficient import Loss
from equipoise.correction.estimator import Estimator, ModeName
from equipoise.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SAGA(Estimator):
    """SAGA (Defazio et al. 2014) over batches: g = g_new - (g_i - mean of all g), g_i as last seen for batch i.

    A batch keeps its images in every epoch; only the order of the batches changes. A table holds the last gradient
    of each batch at the active weights, so there are no extra passes. The first epoch fills the table and is not
    corrected.
    """

    mode: ModeName = "table"
    modes: ClassVar[tuple[ModeName, ...]] = ("table",)
    fixed_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_fraction != 1:
            raise UserError("step_fraction must be 1 with SAGA, which has no extra passes that it could save")
        if isinstance(self.coefficient, Loss):
            raise UserError("coefficient=loss compares losses at old weights; SAGA takes fixed, gradient or linear")
