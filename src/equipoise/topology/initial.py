"""The initial mask of a topology."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.modules import require_values
from equipoise.seeds import derive
from equipoise.shards import gather, is_sharded
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.pattern import Pattern, parse_pattern
from equipoise.topology.selection import select, unwrap

FEW_ZEROS = 1e-4  # fraction of a dense weight that may be zero by chance


class Planned(NamedTuple):
    """Plan for one sparse weight.

    Attributes:
        name: Name of the weight.
        weight: The weight.
        initial: Number of active weights at the start.
        final: Number of active weights at the end.
        active: Flat indices of the weights that are active at the start, in no order.
        nonzeros: Number of weights that are not zero if the weight is already sparse; 0 if it is dense.
    """

    name: str
    weight: nn.Parameter
    initial: int
    final: int
    active: Tensor
    nonzeros: int


def plan_layers(algorithm: Algorithm, model: nn.Module) -> list[Planned]:
    """Return the weights that the algorithm makes sparse. The plan is the same on every device and in every storage."""
    if algorithm.sparsity == 0 and isinstance(algorithm.distribution, str):
        return []
    model = unwrap(model)
    chosen = select(model, algorithm.include, algorithm.exclude, algorithm.dense_first, algorithm.dense_last)
    pattern = parse_pattern(algorithm.pattern)
    chosen = chosen if pattern is None else _with_pattern(pattern, chosen)
    shapes = {name: tuple(weight.shape) for name, weight in chosen.items()}
    initial, final = algorithm.initial_counts(shapes, model), algorithm.final_counts(shapes, model)
    if not any(final.values()):
        size = sum(weight.numel() for weight in chosen.values())
        raise UserError(f"none of the {size} chosen weights would be active; choose a lower sparsity or more weights")
    kept = {name: _kept(algorithm, name, weight, initial[name]) for name, weight in chosen.items()}
    if algorithm.global_budget:
        initial = _all_nonzeros(initial, kept, sum(final.values()))
    generator = torch.Generator()  # on the CPU: the same initial mask on every device
    planned = []
    for name, weight in chosen.items():
        generator.manual_seed(derive(algorithm.seed, "mask", name))
        order, budget, magnitudes = torch.randperm(weight.numel(), generator=generator), initial[name], kept[name]
        if least := algorithm.fan_in(len(weight), final[name]):
            order = _each_unit_first(order, len(weight), least)
        if pattern is not None:
            active = _units(pattern, weight, magnitudes, budget, generator)
        else:
            active = order[:budget] if magnitudes is None else _largest(magnitudes, order, budget)
        nonzeros = _count(magnitudes) if algorithm.initial_mask == "nonzeros" else 0
        planned.append(Planned(name, weight, budget, final[name], active, nonzeros))
    return planned


def _with_pattern(pattern: Pattern, chosen: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The weights that can have a pattern; the others stay dense, with a warning."""
    obstacles = {name: pattern.obstacle(weight.shape) for name, weight in chosen.items()}
    fitting = {name: weight for name, weight in chosen.items() if obstacles[name] is None}
    dense = [f'"{name}" ({why})' for name, why in obstacles.items() if why]
    if not fitting:
        raise UserError(f'no weight can have the pattern "{pattern}": {dense[0]}')
    if dense:
        more = f" and {len(dense) - 3} more" if dense[3:] else ""
        warnings.warn(
            f'weights without the pattern "{pattern}" stay dense: {", ".join(dense[:3])}{more}', stacklevel=6
        )
    return fitting


def _units(
    pattern: Pattern, weight: Tensor, magnitudes: Tensor | None, budget: int, generator: torch.Generator
) -> Tensor:
    """Flat indices of random units, or of those with the largest sum of magnitudes; ties are random."""
    score = torch.rand(weight.numel(), generator=generator, dtype=torch.float64)
    if magnitudes is not None:
        score = magnitudes.double() + score * 1e-60
    return pattern.largest(score, budget, weight.shape)


def _kept(algorithm: Algorithm, name: str, weight: Tensor, budget: int) -> Tensor | None:
    """Magnitudes by which the initial mask is chosen, as a vector on the CPU; `None` if it is random."""
    if algorithm.initial_mask == "random":
        return None
    require_values(name, weight)
    weight = gather(weight, weight) if is_sharded(weight) else weight
    if algorithm.initial_mask == "largest":
        return weight.detach().abs().reshape(-1).cpu()
    return _magnitudes(weight, budget)


def _magnitudes(weight: Tensor, budget: int) -> Tensor | None:
    """Magnitudes of a weight that is already sparse, as a vector on the CPU; `None` if it is dense.

    A few zeros do not make a weight sparse, unless the budget is exactly its nonzeros: uniform numbers of a type with
    rounding error ε are zero with a probability of about ε.
    """
    nonzeros = int(torch.count_nonzero(weight))
    zeros = weight.numel() - nonzeros
    few = weight.numel() * max(FEW_ZEROS, 4 * torch.finfo(weight.dtype).eps)
    if zeros == 0 or (zeros <= few and nonzeros != budget):
        return None
    return weight.detach().abs().reshape(-1).cpu()


def _count(magnitudes: Tensor | None) -> int:
    """Number of nonzeros of a weight that is already sparse; 0 if it is dense."""
    return 0 if magnitudes is None else int(torch.count_nonzero(magnitudes))


def _all_nonzeros(initial: dict[str, int], kept: Mapping[str, Tensor | None], budget: int) -> dict[str, int]:
    """Counts that keep all nonzeros of layers without fixed counts, if the budget of the network is enough."""
    counts = {name: _count(kept[name]) or count for name, count in initial.items()}
    return counts if sum(counts.values()) <= budget else initial


def _largest(magnitudes: Tensor, order: Tensor, count: int) -> Tensor:
    """Flat indices of the `count` largest magnitudes; equal ones, such as zeros, in the given order."""
    return order[magnitudes[order].sort(descending=True, stable=True).indices[:count]]


def warn_about_lost(algorithm: Algorithm, plan: Sequence[Planned], stacklevel: int) -> None:
    """Warn if the initial mask sets weights of sparse layers to zero."""
    lost = {layer.name: layer.nonzeros - layer.initial for layer in plan if layer.nonzeros > layer.initial}
    if lost:
        nonzeros = sum(layer.nonzeros for layer in plan if layer.name in lost)
        which = f'"{next(iter(lost))}"' + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        warnings.warn(
            f"{which} had {nonzeros:,} nonzero weights, more than sparsity={algorithm.sparsity} allows: the smallest "
            f'{sum(lost.values()):,} are set to zero; distribution="nonzeros" keeps all of them',
            stacklevel=stacklevel + 1,
        )


def _each_unit_first(order: Tensor, units: int, count: int) -> Tensor:
    """Move the first `count` indices of every unit to the front of a permutation."""
    positions = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))  # of each index in `order`
    earliest = positions.view(units, -1).topk(count, largest=False).values
    first = torch.zeros(len(order), dtype=torch.bool).index_fill_(0, earliest.reshape(-1), True)
    return torch.cat([order[first], order[~first]])
