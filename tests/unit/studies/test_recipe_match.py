"""Which recipes describe the same experiment."""

from typing import Any

import pytest

from equipoise.studies.recipe_match import differences, same_recipe
from train_helpers import tiny


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"device": "cpu"}, True),
        ({"checkpoint": {"every": 5}}, True),
        ({"storage": "packed"}, True),
        ({"data": {"name": "digits", "batch": 240, "root": "elsewhere"}}, True),
        ({"correction": {"name": "agent", "mode": "replay"}}, True),
        ({"correction": {"name": "agent", "gamma": 0.2}}, False),
        ({"correction": "svrg"}, False),
        ({"epochs": 3}, False),
        ({"seed": 1}, False),
        ({"data": {"name": "digits", "batch": 120}}, False),
    ],
)
def test_which_recipes_match(change: dict[str, Any], same: bool) -> None:
    asked = tiny(correction="agent", seed=0)
    assert same_recipe(asked, {**asked, **change}) is same


def test_a_mode_that_was_asked_for_counts() -> None:
    asked, found = (tiny(correction={"name": "agent", "mode": mode}) for mode in ("replay", "running"))
    assert not same_recipe(asked, found)
    assert not same_recipe(asked, tiny(correction="agent"))
    assert not same_recipe(tiny(storage="masked"), tiny(storage="packed"))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"seed": 1, "device": "cpu", "storage": "packed", "checkpoint": {"every": 5}}, []),
        ({"correction": {"name": "agent", "mode": "replay"}}, []),
        ({"correction": {"name": "agent", "mode": "recompute"}}, []),
        ({"correction": {"name": "agent", "mode": "running"}}, ["correction"]),
        ({"epochs": 3, "correction": "svrg"}, ["correction", "epochs"]),
    ],
)
def test_seeds_of_one_arm_differ_only_in_their_machine(change: dict[str, Any], keys: list[str]) -> None:
    recipe = tiny(correction="agent", seed=0)
    assert differences(recipe, {**recipe, **change}) == differences({**recipe, **change}, recipe) == keys
