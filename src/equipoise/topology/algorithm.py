"""Base classes of the topology algorithms, which choose the weights to drop and to grow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from equipoise.config import shown
from equipoise.errors import UserError
from equipoise.topology.distribution import Distribution, Shapes, active_counts
from equipoise.topology.pattern import NM, parse_pattern
from equipoise.topology.schedule import Decay, Window, decay, interval
from equipoise.topology.selection import Selector, as_selectors

if TYPE_CHECKING:
    from equipoise.storage.sparse_weight import SparseWeight
    from equipoise.topology.topology import Topology

DenseGradient = Literal["never", "at updates", "always"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all topology algorithms.

    Args:
        sparsity: Fraction of the chosen weights that is zero.
        distribution: How the active weights are distributed over the layers: `erk`, `er`, `uniform`, `bsr`, or
            explicit densities by name pattern or in layer order. `nonzeros` keeps the weights of a pruned model.
        include: Name patterns and module types of the weights to make sparse; replaces the default types.
        exclude: Name patterns and module types of weights that stay dense.
        dense_first: Whether the first of these weights stays dense.
        dense_last: Whether the last of these weights stays dense.
        initial_mask: Which weights are active at the start. `nonzeros`: a weight that already has zeros keeps its
            nonzeros, the largest if the budget is smaller, and random ones are added if it is larger; other weights
            get a random mask. `random`: every weight gets a random mask. `largest`: every weight keeps its largest
            values, as for a dense model that is pruned.
        min_fan_in: Number of active weights that every unit keeps, if its layer has as many per unit. A unit is an
            entry of the first dimension of a weight.
        pattern: Structure of the active weights: `n:m` such as `2:4`, `transposable 2:4`, blocks of outputs x inputs
            such as `16x1`, the fixed `butterfly 16x16`, or `fan_in`, the same number of weights for every output.
            Weights that do not divide stay dense.
        seed: Seed of the initial mask and of random growth.
    """

    sparsity: float = 0.9
    distribution: Distribution = "erk"
    include: tuple[Selector, ...] = ()
    exclude: tuple[Selector, ...] = ()
    dense_first: bool = False
    dense_last: bool = False
    initial_mask: Literal["nonzeros", "random", "largest"] = "nonzeros"
    min_fan_in: int = 0
    pattern: str = ""
    seed: int = 0

    # Whether single layers have no fixed number of active weights, only the network.
    global_budget: ClassVar[bool] = False
    # Whether the mask of a weight never changes.
    fixed: ClassVar[bool] = False
    # At which steps the algorithm needs the gradient of inactive weights.
    dense_gradient: ClassVar[DenseGradient] = "never"

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("include", "exclude"):
            object.__setattr__(self, name, as_selectors(getattr(self, name)))
        if not 0 <= self.sparsity < 1:
            raise UserError(f"sparsity={self.sparsity}: the fraction of zero weights must be in [0, 1), such as 0.9")
        if self.initial_mask not in ("nonzeros", "random", "largest"):
            raise UserError(f'initial_mask="{self.initial_mask}": expected "nonzeros", "random" or "largest"')
        if self.min_fan_in < 0:
            raise UserError(f"min_fan_in={self.min_fan_in}: a number of weights must not be negative")
        self._check_pattern()

    def _check_numbers(self) -> None:
        """Refuse a number in quotes, which would fail later with an unclear message."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float", "int | float", int, float) and not isinstance(value, Real):
                raise UserError(f"{field.name}={shown(value)}: expected a number")

    def _check_pattern(self) -> None:
        pattern = parse_pattern(self.pattern)
        if pattern is not None and (obstacle := self.pattern_obstacle()):
            raise UserError(f'pattern="{pattern}": {obstacle}')
        if pattern is not None and self.min_fan_in:
            raise UserError(f'min_fan_in={self.min_fan_in}: not with pattern="{pattern}", whose counts are fixed')
        if pattern is not None and pattern.fixed and not self.fixed:
            raise UserError(f'pattern="{pattern}": its mask never changes; use the topology static')
        if isinstance(pattern, NM):
            if not math.isclose(self.sparsity, pattern.sparsity):
                needed = f"sparsity={pattern.sparsity:g}"
                raise UserError(f'sparsity={self.sparsity}: pattern="{pattern}" has {needed}; set {needed} too')
            if not isinstance(self.distribution, str):
                raise UserError(
                    f'pattern="{pattern}" gives every weight the same density; leave out the distribution'
                )

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int | None = None) -> Topology:
        """Make the model sparse and keep it sparse at every step of the optimizer.

        A model that is already sparse keeps its nonzeros, see `initial_mask`; a warning says if some are lost.

        Args:
            model: The model. Its weights stay plain parameters with unchanged names.
            optimizer: Its optimizer.
            total_steps: Number of optimizer steps of the whole training; schedules are fractions of it.

        Returns:
            The topology, whose hooks are now installed.
        """
        from equipoise.topology.topology import Topology

        return Topology(self, model, optimizer, total_steps)

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        """Number of active weights of each layer at the start."""
        return self.final_counts(shapes, model)

    def final_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        """Number of active weights of each layer at the end."""
        counts = active_counts(self.distribution, shapes, 1 - self.sparsity, model)
        pattern = parse_pattern(self.pattern)
        if pattern is None:
            return counts
        return {name: pattern.final_count(count, shapes[name]) for name, count in counts.items()}

    def fan_in(self, units: int, active: int) -> int:
        """Number of active weights that each unit of a layer keeps: `min_fan_in`, or as many as the layer has."""
        return min(self.min_fan_in, active // units)

    def window(self, total_steps: int | None) -> Window | None:
        """The window of update steps; `None` if the algorithm has none."""
        return None

    def bits_to_remember(self, weight: Tensor) -> Tensor | None:
        """Bits to keep of a weight before it is packed, one for each element; `None` if the algorithm needs none."""
        return None

    def pattern_obstacle(self) -> str | None:
        """Why the algorithm cannot have its pattern, and which one can; `None` if it can."""
        return None

    def packing_obstacle(self) -> str | None:
        """Why the algorithm needs masked storage; `None` if it does not."""
        return None

    def observe(self, layer: SparseWeight, scale: Tensor | None) -> None:
        """Observe a gradient. Called before every optimizer step if `dense_gradient` is `always`.

        Args:
            layer: The weight, with the gradient of all its indices.
            scale: Factor by which the gradient exceeds that of the optimizer, such as a loss scale; `None` if there is
                none.
        """


@dataclass(frozen=True, kw_only=True)
class Dynamic(Algorithm):
    """Base of the algorithms that drop and grow weights at update steps.

    Args:
        every: Steps between updates, or a fraction of the training if below 1.
        begin: Fraction of the training after which updates begin.
        until: Fraction of the training after which updates end.
        drop_fraction: Fraction of a layer's active weights that the first update exchanges.
        drop_end: This fraction at the end of the updates.
        drop_decay: How the fraction changes in between: `constant`, `linear` or `cosine`.
        step_at_update: Whether to `take` the optimizer step at update steps (ITOP) or to `skip` it (RigL).
        regrow: Whether a weight that an update dropped may be grown again by the same update.
    """

    every: int | float = 100
    begin: float = 0.0
    until: float = 0.75
    drop_fraction: float = 0.3
    drop_end: float = 0.0
    drop_decay: Decay = "cosine"
    step_at_update: Literal["take", "skip"] = "take"
    regrow: bool = True

    itop_every: ClassVar[int] = 1500

    @classmethod
    def itop(cls, **options: Any) -> Self:
        """Return the algorithm with the schedule of ITOP (in-time over-parameterisation, Liu et al. 2021).

        It updates every 1,500 steps (RigL: 4,000) until the end of training. The drop fraction decays from 0.5 to
        0.005 by cosine, unless the algorithm exchanges no weights (GMP). The optimizer step is taken at updates, and
        a dropped weight may be grown again.

        Args:
            **options: Fields of the algorithm that differ from this schedule.
        """
        long: Mapping[str, Any] = {"every": cls.itop_every, "until": 1.0, "step_at_update": "take", "regrow": True}
        exchange = {"drop_fraction": 0.5, "drop_end": 0.005, "drop_decay": "cosine"} if cls.drop_fraction else {}
        return cls(**{**long, **exchange, **options})

    @classmethod
    def fast(cls, **options: Any) -> Self:
        """Return the algorithm for a short training: ER densities, and an interval of updates that fits its length.

        Every unit keeps a weight. A unit without inputs has no gradient and is never grown again; RigL at 99 % loses
        a thousand units of VGG-C to this in 12 epochs, and some runs collapse.

        Args:
            **options: Fields of the algorithm that differ.
        """
        least = 0 if options.get("pattern", cls.pattern) else 1  # a pattern has fixed counts
        return cls(**{"distribution": "er", "every": 0.02, "min_fan_in": least, **options})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, fraction in (("drop_fraction", self.drop_fraction), ("drop_end", self.drop_end)):
            if not 0 <= fraction <= 1:
                raise UserError(f"{name}={fraction}: the fraction of the active weights must be between 0 and 1")
        decay(self.drop_decay, 0.0, 0.0, 0.0)
        if self.step_at_update not in ("take", "skip"):
            raise UserError(f'step_at_update="{self.step_at_update}": expected "take" or "skip"')
        if self.every <= 0 or (self.every > 1 and self.every != int(self.every)):
            raise UserError(f"every={self.every}: a whole number of steps, or a fraction of the training below 1")
        Window(interval(self.every, 1), self.begin, self.until, 1)

    def window(self, total_steps: int | None) -> Window:
        if total_steps is None:
            name = type(self).__name__
            raise UserError(f"{name} needs total_steps, the number of optimizer steps, in attach()")
        return Window(interval(self.every, total_steps), self.begin, self.until, total_steps)

    def target(self, layer: SparseWeight, completion: float) -> int:
        """Number of active weights of the layer after this update."""
        return layer.active

    def choose(
        self, layer: SparseWeight, window: Window, step: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Return the flat indices to drop and to grow at an update step; `None` if the layer does not change."""
        target = self.target(layer, window.completion(step))
        pattern = parse_pattern(self.pattern)
        if pattern is not None:
            target = pattern.whole(target, layer.mask().shape)
        swap = self._swap(layer, target, window.progress(step))
        count = layer.active - target + swap
        if count == 0:
            return None
        if pattern is not None:
            scores = self.drop_score(layer), self.growth_score(layer, generator)
            return pattern.exchange(*scores, layer.mask(), layer.active - target, swap, self.regrow)
        dropped = self.drop(layer, count)
        if swap == 0:
            return dropped, dropped[:0]
        return dropped, layer.highest(self.growth_score(layer, generator), swap, dropped, self.regrow)

    def _swap(self, layer: SparseWeight, target: int, progress: float) -> int:
        if target == layer.size:
            return 0
        wanted = round(decay(self.drop_decay, self.drop_fraction, self.drop_end, progress) * target)
        if self.min_fan_in:
            units = len(layer.mask())
            wanted = min(wanted, target - units * self.fan_in(units, layer.final))
        return wanted if self.regrow else min(wanted, layer.size - layer.active)

    def drop(self, layer: SparseWeight, count: int) -> Tensor:
        """Flat indices of the `count` weights to drop."""
        score = self.drop_score(layer)
        return layer.lowest(score, count, self._droppable(layer, score) if self.min_fan_in else None)

    def _droppable(self, layer: SparseWeight, score: Tensor) -> Tensor:
        """Boolean vector of the active weights without the `min_fan_in` best of each unit."""
        active = layer.mask().flatten(1)
        best = score.view(active.shape).masked_fill(~active, -torch.inf)
        kept = best.topk(self.fan_in(len(active), layer.final), dim=1).indices
        return active.scatter(1, kept, False).reshape(-1)

    def drop_score(self, layer: SparseWeight) -> Tensor:
        """Score of each weight; the lowest are dropped. The magnitude by default."""
        return layer.weight.abs()

    def growth_score(self, layer: SparseWeight, generator: torch.Generator) -> Tensor:
        """Score of each weight; the highest of the inactive ones are grown. Random by default."""
        return torch.rand(layer.size, generator=generator, device=layer.parameter.device)
