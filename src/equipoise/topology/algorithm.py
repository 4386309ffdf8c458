"""What every topology algorithm is: a few numbers and the choice of what to drop and grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from equipoise.config import shown
from equipoise.errors import UserError
from equipoise.topology.distribution import Distribution, Shapes, active_counts
from equipoise.topology.schedule import Decay, Window, decay
from equipoise.topology.selection import Selector, as_selectors

if TYPE_CHECKING:
    from equipoise.storage.layer import Layer
    from equipoise.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all: how sparse, where, and shared out how.

    sparsity: share of the chosen weights that is zero.
    distribution: `erk` (default), `er`, `uniform`, `bsr`, or explicit densities by name pattern or in order.
    include, exclude, dense_first, dense_last: which weights (see `equipoise.topology.selection.select`).
    seed: of the initial mask and of random growth.
    """

    sparsity: float = 0.9
    distribution: Distribution = "erk"
    include: tuple[Selector, ...] = ()
    exclude: tuple[Selector, ...] = ()
    dense_first: bool = False
    dense_last: bool = False
    seed: int = 0

    # When the algorithm must see the gradient of inactive weights too.
    dense_gradient: ClassVar[Literal["never", "at updates", "always"]] = "never"

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("include", "exclude"):
            object.__setattr__(self, name, as_selectors(getattr(self, name)))
        if not 0 <= self.sparsity < 1:
            raise UserError(f"sparsity={self.sparsity}: the share of zero weights is in [0, 1), such as 0.9")

    def _check_numbers(self) -> None:
        """A number in quotes would fail much later, and in words that say nothing."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float", int, float) and not isinstance(value, Real):
                raise UserError(f"{field.name}={shown(value)}: expected a number")

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int | None = None) -> Topology:
        """Make the model sparse and keep it so at every step of the optimizer.

        total_steps: optimizer steps in all of training, which schedules are shares of.
        """
        from equipoise.topology.topology import Topology

        return Topology(self, model, optimizer, total_steps)

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        return self.final_counts(shapes, model)

    def final_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        return active_counts(self.distribution, shapes, 1 - self.sparsity, model)

    def window(self, total_steps: int | None) -> Window | None:
        """The update steps; None where the topology never changes."""
        return None

    def prepare(self, layer: Layer) -> None:
        """Called once for each layer, before its inactive weights are set to zero."""

    def bits_to_remember(self, weight: Tensor) -> Tensor | None:
        """One bit per place of a weight that is about to be packed, in bytes, where the algorithm needs them."""
        return None

    def after_step(self, topology: Topology) -> None:
        """Called after every optimizer step by algorithms that rewire all the time."""

    def observe(self, layer: Layer) -> None:
        """Called before every optimizer step by algorithms that watch the dense gradient always."""


@dataclass(frozen=True, kw_only=True)
class Dynamic(Algorithm):
    """Base of the algorithms that drop and grow.

    every: steps between updates. begin, until: shares of training between which they happen.
    drop_fraction: share of a layer's active weights exchanged per update, going to `drop_end` by `drop_decay`.
    step_at_update: `take` the optimizer's step at update iterations (ITOP) or `skip` it (RigL).
    regrow: whether a weight dropped in an update may be grown again in the same update.
    """

    every: int = 100
    begin: float = 0.0
    until: float = 0.75
    drop_fraction: float = 0.3
    drop_end: float = 0.0
    drop_decay: Decay = "cosine"
    step_at_update: Literal["take", "skip"] = "take"
    regrow: bool = True

    itop_every: ClassVar[int] = 1500

    # Whether the largest |gradient| of inactive weights are all that growth looks at: packed storage keeps no others.
    grows_by_magnitude: ClassVar[bool] = False

    @classmethod
    def needs_largest_only(cls) -> bool:
        """`grows_by_magnitude`, unless a class below the one that says so chooses weights in its own way."""
        said = _definer(cls, "grows_by_magnitude")
        choosing = ("choose", "growth_score", "drop", "drop_score")
        return cls.grows_by_magnitude and all(issubclass(said, _definer(cls, name)) for name in choosing)

    @classmethod
    def itop(cls, **options: Any) -> Self:
        """In-time over-parameterisation (Liu et al. 2021): long intervals, never stopping.

        every 1,500 iterations (RigL: 4,000), until the end, drop fraction 0.5 -> 0.005 by cosine (where the
        algorithm exchanges weights at all: GMP does not), the step is taken, a just-dropped weight may be regrown.
        """
        long: Mapping[str, Any] = {"every": cls.itop_every, "until": 1.0, "step_at_update": "take", "regrow": True}
        exchange = {"drop_fraction": 0.5, "drop_end": 0.005, "drop_decay": "cosine"} if cls.drop_fraction else {}
        return cls(**{**long, **exchange, **options})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, fraction in (("drop_fraction", self.drop_fraction), ("drop_end", self.drop_end)):
            if not 0 <= fraction <= 1:
                raise UserError(f"{name}={fraction}: a share of the active weights, between 0 and 1")
        decay(self.drop_decay, 0.0, 0.0, 0.0)
        if self.step_at_update not in ("take", "skip"):
            raise UserError(f'step_at_update="{self.step_at_update}": it is "take" or "skip"')
        Window(self.every, self.begin, self.until, 1)

    def window(self, total_steps: int | None) -> Window:
        if total_steps is None:
            name = type(self).__name__
            raise UserError(f"{name} needs total_steps, the optimizer steps of the whole training, in attach()")
        return Window(self.every, self.begin, self.until, total_steps)

    def target(self, layer: Layer, completion: float) -> int:
        """The active weights the layer shall have after this update."""
        return layer.active

    def choose(
        self, layer: Layer, window: Window, step: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """The flat places to drop and to grow at an update step; None where the layer stays as it is."""
        target = self.target(layer, window.completion(step))
        swap = self._swap(layer, target, window.progress(step))
        count = layer.active - target + swap
        if count == 0:
            return None
        dropped = self.drop(layer, count)
        if swap == 0:
            return dropped, dropped[:0]
        return dropped, layer.highest(self.growth_score(layer, generator), swap, dropped, self.regrow)

    def most_grown(self, layer: Layer, window: Window, step: int) -> int:
        """How many places the layer will grow at an update step, or a few more."""
        return self._swap(layer, self.target(layer, window.completion(step)), window.progress(step))

    def _swap(self, layer: Layer, target: int, progress: float) -> int:
        if target == layer.size:
            return 0
        wanted = round(decay(self.drop_decay, self.drop_fraction, self.drop_end, progress) * target)
        return wanted if self.regrow else min(wanted, layer.size - layer.active)

    def drop(self, layer: Layer, count: int) -> Tensor:
        return layer.lowest(self.drop_score(layer), count)

    def drop_score(self, layer: Layer) -> Tensor:
        """The lowest are dropped; magnitude unless an algorithm says otherwise."""
        return layer.weight.abs()

    def growth_score(self, layer: Layer, generator: torch.Generator) -> Tensor:
        """The highest of the inactive are grown; random unless an algorithm says otherwise."""
        return torch.rand(layer.size, generator=generator, device=layer.parameter.device)


def _definer(cls: type, name: str) -> type:
    """The class that a class has an attribute from."""
    return next(base for base in cls.__mro__ if name in vars(base))
