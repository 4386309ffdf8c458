"""The options of a gradient correction: the base class of all estimators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from torch import nn

from equipoise.checks import require_whole
from equipoise.config import build, shown
from equipoise.correction.coefficient import (
    COEFFICIENTS,
    Coefficient,
    CoefficientChoice,
    CoefficientOptions,
    Fixed,
    Loss,
)
from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.correction.correction import Correction
    from equipoise.correction.gradients import Gradients
    from equipoise.topology import Topology
    from equipoise.world import World

ModeName = Literal["recompute", "replay", "running", "previous", "table"]
When = Literal["always", "pays"]
TableType = Literal["float32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Base of the corrections g = g_new - w·(g_old - g̃), w = γ·c.

    Args:
        gamma: γ.
        coefficient: How c is found: `Fixed`, `Linear`, `Loss` or `Gradient`, a name, or a mapping of options with an
            optional `name`. Options that are not given keep the defaults of the estimator.
        mode: How g_old and g̃ are obtained. `recompute`: g_old by a second pass on every batch, g̃ by a full pass over
            the batches at the snapshot. `replay`: one pass over the coming batches at the snapshot, whose gradients
            are stored. `running`: g_old by a second pass, g̃ by the mean of the g_old of the earlier batches; there is
            no full pass. MVR uses `previous` and SAGA uses `table`.
        batch_fraction: Fraction of the batches that g̃ is computed on.
        step_fraction: Fraction of the steps that are corrected.
        every: Steps between refreshes; 0 refreshes once per epoch.
        from_epoch: First epoch that is corrected.
        when: `always`, or `pays` to correct only the epochs in which variance left x cost is below 1. With
            `running` and `every`, √(variance left x cost) + 1/√every must be below 1.
        probe: Batches on which `pays` measures the variance left at each refresh.
        table: Storage of the gradients that `replay` and SAGA keep: as computed (`float32`) or in `bf16`.

    Raises:
        UserError: An option is out of range, or two options exclude each other.
    """

    gamma: float = 1.0
    coefficient: CoefficientChoice = field(default=Fixed())
    mode: ModeName = "recompute"
    batch_fraction: float = 1.0
    step_fraction: float = 1.0
    every: int = 0
    from_epoch: int = 0
    when: When = "always"
    probe: int = 8
    table: TableType = "float32"

    modes: ClassVar[tuple[ModeName, ...]] = ("recompute", "replay", "running")
    corrects: ClassVar[bool] = True
    learning_rate_factor: ClassVar[float] = 1.0  # the training loop multiplies the learning rate by it
    fixed_batches: ClassVar[bool] = False  # whether batches keep their images in every epoch

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficient", self._coefficient_options())
        choices = {"mode": self.modes, "when": get_args(When), "table": get_args(TableType)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UserError(f'{name}="{getattr(self, name)}" must be {" or ".join(known)}')
        for name in ("gamma", "batch_fraction", "step_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} must be between 0 and 1")
        for name in ("batch_fraction", "step_fraction"):
            if getattr(self, name) == 0:
                raise UserError(f'{name}=0 would correct nothing; use the correction "sgd"')
        require_whole(0, every=self.every, from_epoch=self.from_epoch)
        require_whole(2, probe=self.probe)
        if self.mode == "replay" and (self.batch_fraction != 1 or self.step_fraction != 1):
            raise UserError("replay stores the gradient of every batch; batch_fraction and step_fraction must be 1")
        if self.mode == "running" and self.batch_fraction != 1:
            raise UserError("running has no full pass that batch_fraction could shorten; it must be 1")

    def _coefficient_options(self) -> CoefficientOptions:
        chosen, default = self.coefficient, type(self).coefficient
        if isinstance(chosen, CoefficientOptions):
            return chosen
        options = {"name": chosen} if isinstance(chosen, str) else chosen
        if not isinstance(options, Mapping) or not isinstance(options.get("name", ""), str):
            raise UserError(f"coefficient={shown(chosen)} must be one of {', '.join(COEFFICIENTS)}")
        assert isinstance(default, CoefficientOptions)
        kind = COEFFICIENTS[options["name"]] if "name" in options else type(default)
        defaults = vars(default) if kind is type(default) else {}
        return build(kind, {**defaults, **{k: v for k, v in options.items() if k != "name"}}, "coefficient")

    def attach(
        self,
        model: nn.Module,
        topology: Topology | None = None,
        total_steps: int | None = None,
        seed: int = 0,
        *,
        world: World | None = None,
        cost: float | None = None,
        gradients: Gradients | None = None,
        bn_trace: bool = False,
    ) -> Correction:
        """Attach the correction to a model and to the active weights of its topology.

        Args:
            model: The model whose gradients are corrected.
            topology: The topology of the model; found by itself if the model has one.
            total_steps: Calls of `backward` in the whole training, which a linear coefficient needs.
            seed: Seed of the choice of batches with `batch_fraction`.
            world: The processes that train the model together; by default those of DistributedDataParallel.
            cost: Passes per epoch relative to SGD, if a step of the loop is more than one forward and backward pass.
            gradients: Runs the passes and holds the gradients; by default `.grad` of the parameters.
            bn_trace: Leave the BatchNorm statistics of the full pass in the model, as the published code of AGENT does.
                For comparisons with it only: the model is then scored with other statistics than one without AGENT.
        """
        from equipoise.correction.correction import Correction

        return Correction(self, model, topology, total_steps, seed, world, cost, gradients, bn_trace)

    def make_coefficient(self) -> Coefficient:
        """Make the running coefficient of one training."""
        assert isinstance(self.coefficient, CoefficientOptions)
        return self.coefficient.make()

    @property
    def compared_fraction(self) -> float:
        """Fraction of the batches of a full pass that also run forward at the previous snapshot."""
        loss = self.coefficient
        if not isinstance(loss, Loss) or self.mode not in ("recompute", "replay") or self.when == "pays":
            return 0.0
        if loss.batch_fraction is not None:
            return loss.batch_fraction
        return 1.0 if self.mode == "recompute" else 0.1

    @property
    def keeps_snapshot(self) -> bool:
        """Whether passes run at the old weights after the refresh that took them."""
        return self.mode in ("recompute", "running", "previous") or self.compared_fraction > 0 or self.when == "pays"

    @property
    def cost(self) -> float:
        """Passes per epoch relative to SGD; a forward pass counts 1 and a backward pass 2."""
        old = self.step_fraction if self.mode in ("recompute", "running", "previous") else 0.0
        full = {"recompute": self.batch_fraction, "replay": 1.0}.get(self.mode, 0.0)
        return 1 + old + full * (1 + self.compared_fraction / 3)
