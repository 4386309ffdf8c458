"""Groups and units of the patterns, index by index."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Groups = list[list[list[tuple[int, ...]]]]  # groups of units of indices


def groups_of(pattern: str, shape: tuple[int, ...]) -> Groups:
    """Groups and units of a weight, index by index."""
    outputs, inputs, *kernel = shape
    places = list(itertools.product(*map(range, kernel)))
    if pattern.startswith("transposable"):  # rows and columns of tiles
        return groups_of(pattern.split()[1], shape) + _columns(int(pattern.split(":")[1]), shape)
    if pattern == "fan_in":
        return [[[(o, i, *k)] for i in range(inputs) for k in places] for o in range(outputs)]
    if ":" in pattern:
        m = int(pattern.split(":")[1])
        starts = itertools.product(range(outputs), places, range(0, inputs, m))
        return [[[(o, i + j, *k)] for j in range(m)] for o, k, i in starts]
    rows, columns = map(int, pattern.split("x"))
    blocks = itertools.product(range(0, outputs, rows), range(0, inputs, columns), places)
    return [[[(o + a, i + b, *k) for a in range(rows) for b in range(columns)] for o, i, k in blocks]]


def _columns(m: int, shape: tuple[int, ...]) -> Groups:
    outputs, inputs, *kernel = shape
    starts = itertools.product(range(0, outputs, m), range(inputs), itertools.product(*map(range, kernel)))
    return [[[(o + j, i, *k)] for j in range(m)] for o, i, k in starts]


def counts_in_groups(mask: NDArray[np.bool_], pattern: str) -> list[int]:
    """Active units of every group; fails if a unit is active in part."""
    found = []
    for group in groups_of(pattern, mask.shape):
        on = [{bool(mask[index]) for index in unit} for unit in group]
        assert all(len(values) == 1 for values in on)
        found.append(sum(values == {True} for values in on))
    return found
