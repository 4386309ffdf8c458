"""How the budget of active weights is shared between layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import UserError
from equipoise.models import resnet34, vgg16, vgg_c
from equipoise.topology.distribution import DENSITY_RULES, Shapes, active_counts, whole_counts
from equipoise.topology.selection import select

dimension = st.integers(1, 40)
shape = st.one_of(
    st.tuples(dimension, dimension),
    st.tuples(dimension, dimension, st.sampled_from([1, 3])),
    st.tuples(dimension, dimension, st.sampled_from([1, 3, 5]), st.sampled_from([1, 3])),
)
networks = st.lists(shape, min_size=1, max_size=8).map(lambda s: {f"layer{i}": x for i, x in enumerate(s)})
densities = st.floats(0.001, 1)
rules = st.sampled_from(sorted(DENSITY_RULES))


def shapes_of(model: object) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in select(model).items()}  # type: ignore[arg-type]


def density_by_layer(counts: Mapping[str, int], shapes: Shapes) -> dict[str, float]:
    return {name: counts[name] / math.prod(shapes[name]) for name in shapes}


def ideal_counts(rule: str, shapes: Shapes, budget: int) -> dict[str, float]:
    """Bisection on ε in min(1, ε·raw density): an oracle that knows nothing of rounds of saturation."""
    size = np.array([math.prod(s) for s in shapes.values()], float)
    first_two = np.array([s[:2] for s in shapes.values()], float)
    raw = {
        "uniform": np.ones(len(size)),
        "er": first_two.sum(1) / first_two.prod(1),
        "erk": np.array([sum(s) for s in shapes.values()]) / size,
    }[rule]
    low, high = 0.0, 1 / raw.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (size * np.minimum(1, middle * raw)).sum() < budget else (low, middle)
    return dict(zip(shapes, size * np.minimum(1, high * raw), strict=True))


@given(rule=rules, shapes=networks, density=densities)
def test_counts_are_whole_and_add_up_exactly(rule: str, shapes: Shapes, density: float) -> None:
    counts = active_counts(rule, shapes, density)
    sizes = {name: math.prod(s) for name, s in shapes.items()}
    budget = round(density * sum(sizes.values()))
    assert list(counts) == list(shapes)
    assert sum(counts.values()) == budget
    assert all(isinstance(counts[name], int) and 0 <= counts[name] <= sizes[name] for name in shapes)
    if budget >= len(shapes):
        assert min(counts.values()) >= 1  # no layer is cut off where the budget allows one weight each


@given(rule=rules, shapes=networks, density=densities)
def test_counts_are_the_rule_to_within_one_weight(rule: str, shapes: Shapes, density: float) -> None:
    counts = active_counts(rule, shapes, density)
    ideal = ideal_counts(rule, shapes, sum(counts.values()))
    # Layers that the rule gives less than one weight get one, which the largest have to pay.
    paid = sum(value < 1 for value in ideal.values())
    for name in shapes:
        assert abs(counts[name] - ideal[name]) <= 1 + paid + 1e-6


@given(rule=rules, shapes=networks, pair=st.tuples(densities, densities))
def test_no_layer_loses_when_the_budget_grows(rule: str, shapes: Shapes, pair: tuple[float, float]) -> None:
    """Up to rounding: largest remainders may take one weight back, and the floor of one per layer some more."""
    few, many = (active_counts(rule, shapes, density) for density in sorted(pair))
    slack = 1 + sum(count <= 1 for count in few.values())
    assert all(many[name] >= few[name] - slack for name in shapes)


@given(shapes=networks)
def test_full_density_is_dense(shapes: Shapes) -> None:
    for rule in DENSITY_RULES:
        assert active_counts(rule, shapes, 1.0) == {name: math.prod(s) for name, s in shapes.items()}


@given(
    layers=st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_rounding_keeps_any_ideal_within_its_layers(layers: list[tuple[int, float]]) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(layers)}
    ideal = {str(i): size * density for i, (size, density) in enumerate(layers)}
    budget = round(sum(ideal.values()))
    counts = whole_counts(ideal, sizes, budget)
    assert sum(counts.values()) == budget
    assert all(0 <= counts[name] <= sizes[name] for name in sizes)


def test_the_largest_remainders_are_rounded_up() -> None:
    ideal = {"a": 3.2, "b": 5.7, "c": 2.6, "d": 8.5}
    assert whole_counts(ideal, dict.fromkeys(ideal, 10), 20) == {"a": 3, "b": 6, "c": 3, "d": 8}


def test_erk_on_vgg_c_at_99_percent() -> None:
    shapes = shapes_of(vgg_c())
    assert len(shapes) == 16
    density = density_by_layer(active_counts("erk", shapes, 0.01), shapes)
    first, *_, last = shapes
    assert max(density.values()) < 1
    assert round(density[last], 3) == 0.952
    assert density[first] == pytest.approx(0.394, abs=0.0005 + 1 / math.prod(shapes[first]))  # one weight is 0.0006
    assert round(min(density.values()), 4) == 0.0041


def test_erk_on_vgg_c_at_90_percent() -> None:
    shapes = shapes_of(vgg_c())
    counts = active_counts("erk", shapes, 0.1)
    dense = [name for name, share in density_by_layer(counts, shapes).items() if share == 1]
    first, *_, last = shapes
    assert dense == [first, last]
    assert sum(counts.values()) == round(0.1 * sum(math.prod(s) for s in shapes.values()))


def test_erk_on_resnet34_at_99_percent() -> None:
    shapes = shapes_of(resnet34(bias=False))
    density = density_by_layer(active_counts("erk", shapes, 0.01), shapes)
    assert [name for name, share in density.items() if share == 1] == ["fc.weight"]


SHAPES = {"stem.weight": (8, 3, 3, 3), "body.0.weight": (16, 8), "body.1.weight": (16, 16), "head.weight": (4, 16)}


def test_explicit_densities_by_pattern_or_in_order() -> None:
    by_pattern = active_counts({"stem": 1.0, "body.*": 0.25, "*": 0.5}, SHAPES, 0.01)
    assert list(by_pattern.values()) == [216, 32, 64, 32]
    assert active_counts([1.0, 0.25, 0.25, 0.5], SHAPES, 0.01) == by_pattern


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        ([0.5, 0.5], "2 densities are given for 4 sparse layers"),
        ({"stem": 0.5}, 'no density is given for "body.0.weight"'),
        ({"steem": 0.5, "*": 0.1}, '"steem", which matches no sparse weight'),
        ({"*": 1.5}, 'density 1.5 of "stem.weight" must be between 0 and 1'),
        ("erkk", '"erkk"; did you mean "erk"?'),
        ("bsr", "known only for vgg16"),
    ],
)
def test_wrong_distributions_are_refused_in_one_line(distribution: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        active_counts(distribution, SHAPES, 0.1)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_bsr_starts_from_its_densities_and_spreads_the_rest_by_size(density: float) -> None:
    model = vgg16()
    shapes = shapes_of(model)
    counts = active_counts("bsr", shapes, density, model)
    size = np.array([math.prod(s) for s in shapes.values()], float)
    start = np.array([0.6, 0.6, 0.2, 0.2, *[density / 2] * (len(size) - 5), 0.6]) * size
    rest = round(density * size.sum()) - start.sum()
    assert rest > 0
    assert np.allclose(list(counts.values()), start + rest * size / size.sum(), atol=1)
    assert sum(counts.values()) == round(density * size.sum())
