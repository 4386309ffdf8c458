"""Distribute the budget of active weights over the layers, in integer counts with an exact sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError

Shapes = Mapping[str, Sequence[int]]
Distribution = str | Mapping[str, float] | Sequence[float]


def uniform(shape: Sequence[int]) -> float:
    """The same density in every layer."""
    return 1.0


def er(shape: Sequence[int]) -> float:
    """Erdős–Rényi (Mocanu et al. 2018): density ∝ (n_in + n_out) / (n_in · n_out)."""
    return (shape[0] + shape[1]) / (shape[0] * shape[1])


def erk(shape: Sequence[int]) -> float:
    """Erdős–Rényi-Kernel (Evci et al. 2020): density ∝ sum of all dimensions / product of all dimensions."""
    return sum(shape) / math.prod(shape)


DENSITY_RULES = Catalogue("distribution", {"uniform": uniform, "er": er, "erk": erk})


def active_counts(
    distribution: Distribution, shapes: Shapes, density: float, model: nn.Module | None = None
) -> dict[str, int]:
    """Return the number of active weights of every layer.

    Args:
        distribution: A rule (`uniform`, `er`, `erk`), `nonzeros`, `bsr`, or explicit densities: a mapping from name
            patterns, of which the first match counts, or a sequence in layer order. `nonzeros` counts the weights of
            the model that are not zero, for a model that is already pruned. `bsr` takes BSR-Net's initial densities
            from the model and distributes the rest of the budget over the layers in proportion to their size, as
            BSR-Net's first rewiring does in expectation.
        shapes: Shapes of the sparse weights, by name.
        density: Fraction of all weights that is active; the counts of a rule sum to exactly this fraction, rounded
            to a whole weight. Explicit densities and `nonzeros` ignore it.
        model: The model; only `bsr` and `nonzeros` need it.

    Raises:
        UserError: If the distribution does not fit the layers.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if not isinstance(distribution, str):
        return {name: round(d * sizes[name]) for name, d in _explicit(distribution, list(shapes)).items()}
    if distribution == "nonzeros":
        return _nonzeros(model, sizes)
    budget = round(density * sum(sizes.values()))
    if distribution == "bsr":
        return whole_counts(_bsr(model, sizes, density, budget), sizes, budget)
    rule = DENSITY_RULES[distribution]
    return whole_counts(_saturate({n: rule(s) * sizes[n] for n, s in shapes.items()}, sizes, budget), sizes, budget)


def _saturate(weights: Mapping[str, float], sizes: Mapping[str, int], budget: int) -> dict[str, float]:
    """Scale relative counts to the budget; layers that would exceed their size are dense, the others get the rest."""
    dense: set[str] = set()
    while True:
        free = [name for name in weights if name not in dense]
        rest = budget - sum(sizes[name] for name in dense)
        scale = rest / sum(weights[name] for name in free) if free else 0.0
        over = {name for name in free if scale * weights[name] > sizes[name]}
        if not over:
            return {name: float(sizes[name]) if name in dense else scale * weights[name] for name in weights}
        dense |= over


def whole_counts(ideal: Mapping[str, float], sizes: Mapping[str, int], budget: int) -> dict[str, int]:
    """Round to integers that sum to the budget (largest remainder method), each within [1, size] if possible.

    Args:
        ideal: Real-valued count of each layer.
        sizes: Number of weights of each layer.
        budget: Sum of the counts.
    """
    least = 1 if budget >= len(sizes) else 0
    counts = {name: min(max(math.floor(ideal[name]), least), sizes[name]) for name in sizes}
    spare = budget - sum(counts.values())
    by_remainder = sorted(sizes, key=lambda name: counts[name] - ideal[name])
    while spare > 0:
        for name in [n for n in by_remainder if counts[n] < sizes[n]][:spare]:
            counts[name] += 1
            spare -= 1
    while spare < 0:  # only if the minimum of one weight per layer exceeds the budget
        largest = max(counts, key=lambda name: counts[name])
        counts[largest] -= 1
        spare += 1
    return counts


def _explicit(densities: Mapping[str, float] | Sequence[float], names: list[str]) -> dict[str, float]:
    if not isinstance(densities, Mapping):
        if len(densities) != len(names):
            raise UserError(f"{len(densities)} densities are given for {len(names)} sparse layers")
        return _checked(dict(zip(names, densities, strict=True)))
    for pattern in densities:
        if not any(_names(name, pattern) for name in names):
            raise UserError(f'a density is given for "{pattern}", which matches no sparse weight')
    chosen = {}
    for name in names:
        matching = [d for pattern, d in densities.items() if _names(name, pattern)]
        if not matching:
            raise UserError(f'no density is given for "{name}"; add a pattern "*" at the end for all other weights')
        chosen[name] = matching[0]
    return _checked(chosen)


def _names(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _checked(densities: dict[str, float]) -> dict[str, float]:
    for name, density in densities.items():
        if not 0 <= density <= 1:
            raise UserError(f'density {density} of "{name}" must be between 0 and 1')
    return densities


def _nonzeros(model: nn.Module | None, sizes: Mapping[str, int]) -> dict[str, int]:
    if model is None:
        raise UserError('distribution "nonzeros" needs the model whose weights are counted')
    counts = {name: int(torch.count_nonzero(model.get_parameter(name))) for name in sizes}
    if counts == dict(sizes):
        raise UserError(
            'distribution "nonzeros": none of the chosen weights is zero; load the pruned weights before attaching'
        )
    return counts


def _bsr(model: nn.Module | None, sizes: Mapping[str, int], density: float, budget: int) -> dict[str, float]:
    table = getattr(model, "bsr_densities", None)
    if table is None:
        raise UserError(
            'distribution "bsr" is known only for vgg16, wrn_28_4 and the resnets; give densities by name'
        )
    start = {name: d * sizes[name] for name, d in table(density).items() if name in sizes}
    if missing := set(sizes) - set(start):
        raise UserError(f'distribution "bsr" has no density for "{min(missing)}"')
    rest = budget - sum(start.values())
    if rest < 0:
        return {name: count * budget / (budget - rest) for name, count in start.items()}
    return _fill(start, sizes, rest)


def _fill(start: Mapping[str, float], sizes: Mapping[str, int], rest: float) -> dict[str, float]:
    """Distribute `rest` in proportion to layer size; no layer exceeds its size."""
    filled = dict(start)
    while rest > 1e-9:
        room = [name for name in sizes if filled[name] < sizes[name]]
        if not room:
            break
        weight = sum(sizes[name] for name in room)
        added = {n: min(rest * sizes[n] / weight, sizes[n] - filled[n]) for n in room}
        for name, extra in added.items():
            filled[name] += extra
        rest -= sum(added.values())
    return filled
