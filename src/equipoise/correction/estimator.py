"""What every gradient correction is: a few numbers, and which small parts it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from torch import nn

from equipoise.correction.coefficient import (
    Coefficient,
    FixedCoefficient,
    GradientCoefficient,
    LinearCoefficient,
    LossCoefficient,
)
from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.correction.correction import Correction
    from equipoise.topology import Topology

CoefficientName = Literal["loss", "gradient", "fixed", "linear"]
WayName = Literal["recompute", "replay", "running"]
Way = Literal["recompute", "replay", "running", "previous", "table"]  # those of MVR and SAGA too
When = Literal["always", "pays"]
TableType = Literal["float32", "bf16"]

CHOICES = {"coefficient": CoefficientName, "mode": WayName, "when": When, "table": TableType}


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Base of the corrections g = g_new - w·(g_old - g̃), w = γ·c.

    gamma: γ. coefficient: how c is found (`loss`, `gradient`, `fixed`, `linear`).
    value: c where it is fixed, its start where it falls linearly. smoothing: α of the loss coefficient.
    memory: β of the gradient coefficient's average over steps. per_layer: one gradient coefficient per parameter.
    clamp: keep estimates of c in [0, 1]. loss_share: share of the batches whose losses the loss coefficient
    compares (default: all with `recompute`, as in the paper; a tenth with `replay`).
    mode: how g_old and g̃ are got. `recompute`: g_old by a second pass on every batch, g̃ by a full pass at the
    snapshot. `replay`: the coming batches run once at the snapshot, their gradients are kept. `running`: g_old by a
    second pass, g̃ the mean of the epoch's earlier g_old; no full pass, and the loss coefficient compares the losses
    of the epoch's own steps.
    batch_fraction: share of the batches that g̃ is computed on. step_fraction: share of the steps that are corrected.
    every: steps between refreshes; 0 is once an epoch. from_epoch: no correction before. when: `always`, or `pays`:
    only in epochs where variance left x cost is below 1, measured on `probe` batches at each refresh.
    table: how stored gradients are kept (replay, SAGA), as they are (`float32`) or in `bf16`.
    """

    gamma: float = 1.0
    coefficient: CoefficientName | Mapping[str, Any] = "fixed"
    value: float = 1.0
    smoothing: float = 0.3
    memory: float = 0.95
    per_layer: bool = False
    clamp: bool = True
    loss_share: float | None = None
    mode: WayName = "recompute"
    batch_fraction: float = 1.0
    step_fraction: float = 1.0
    every: int = 0
    from_epoch: int = 0
    when: When = "always"
    probe: int = 8
    table: TableType = "float32"

    # What the training loop multiplies the learning rate with while this correction is used.
    learning_rate_factor: ClassVar[float] = 1.0
    # Whether batches must have the same images in every epoch.
    fixed_batches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.coefficient, Mapping):
            for name, value in self.coefficient.items():
                object.__setattr__(self, "coefficient" if name == "name" else name, value)
        for name, choice in CHOICES.items():
            if getattr(self, name) not in get_args(choice):
                raise UserError(f'{name}="{getattr(self, name)}": it is one of {", ".join(get_args(choice))}')
        if not math.isfinite(self.value):
            raise UserError(f"value={self.value}: a coefficient is a number, such as 1")
        for name in ("gamma", "smoothing", "batch_fraction", "step_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)}: between 0 and 1")
        if not 0 <= self.memory < 1:
            raise UserError(f"memory={self.memory}: in [0, 1), such as 0.95")
        for name in ("batch_fraction", "step_fraction"):
            if getattr(self, name) == 0:
                raise UserError(f'{name}=0 leaves nothing to correct with; use correction "sgd"')
        if self.loss_share is not None and not 0 < self.loss_share <= 1:
            raise UserError(f"loss_share={self.loss_share}: in (0, 1]")
        if self.every < 0 or self.from_epoch < 0:
            raise UserError("every and from_epoch are not negative")
        if self.probe < 2:
            raise UserError(f"probe={self.probe}: a variance needs at least 2 batches")
        if self.mode == "replay" and (self.batch_fraction != 1 or self.step_fraction != 1):
            raise UserError("replay keeps every batch's gradient: batch_fraction and step_fraction are 1 with it")
        if self.mode == "running" and self.batch_fraction != 1:
            raise UserError("running has no full pass that batch_fraction could shorten")

    def attach(
        self, model: nn.Module, topology: Topology | None = None, total_steps: int | None = None, seed: int = 0
    ) -> Correction:
        """Begin correcting the gradients of a model, on the active weights of its topology.

        topology: found by itself where the model has one. total_steps: calls of `backward` in all of training, which
        a linear coefficient falls over. seed: of the batches that `batch_fraction` takes.
        """
        from equipoise.correction.correction import Correction

        return Correction(self, model, topology, total_steps, seed)

    @property
    def corrects(self) -> bool:
        return True

    @property
    def source(self) -> Way:
        return self.mode

    def make_coefficient(self) -> Coefficient:
        match self.coefficient:
            case "loss":
                return LossCoefficient(self.smoothing, self.clamp)
            case "gradient":
                return GradientCoefficient(self.memory, self.per_layer, self.clamp)
            case "fixed":
                return FixedCoefficient(self.value)
            case "linear":
                return LinearCoefficient(self.value)

    @property
    def compared_share(self) -> float:
        """Share of the full pass's batches that also run forward at the previous snapshot."""
        if self.coefficient != "loss" or self.source not in ("recompute", "replay") or self.when == "pays":
            return 0.0
        return self.loss_share if self.loss_share is not None else (1.0 if self.mode == "recompute" else 0.1)

    @property
    def keeps_snapshot(self) -> bool:
        """Whether the old weights themselves are needed, not only gradients taken at them."""
        return self.source in ("recompute", "running", "previous") or self.compared_share > 0 or self.when == "pays"

    @property
    def cost(self) -> float:
        """Passes per epoch as a multiple of SGD's, a forward pass counting 1 and a backward pass 2."""
        old = self.step_fraction if self.source in ("recompute", "running", "previous") else 0.0
        full = {"recompute": self.batch_fraction, "replay": 1.0}.get(self.source, 0.0)
        return 1 + old + full * (1 + self.compared_share / 3)
