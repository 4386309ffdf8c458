"""The options of the algorithms: the schedules of the papers, and wrong values told in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.errors import UserError
from equipoise.topology import ALGORITHMS, GMP, MEST, SET, SNFS, Dynamic, GraNet, RigL, Static
from topology_helpers import DYNAMIC, perceptron

WRONG: Any = "wrong"


@pytest.mark.parametrize("name", DYNAMIC)
def test_every_algorithm_takes_the_itop_schedule(name: str) -> None:
    algorithm = DYNAMIC[name].itop(sparsity=0.8)
    assert isinstance(algorithm, Dynamic)
    assert algorithm.every == (4000 if name == "rigl" else 1500)
    assert (algorithm.until, algorithm.step_at_update, algorithm.regrow) == (1.0, "take", True)
    exchange = (algorithm.drop_fraction, algorithm.drop_end, algorithm.drop_decay)
    assert exchange == ((0.0, 0.0, "cosine") if name == "gmp" else (0.5, 0.005, "cosine"))
    assert DYNAMIC[name].itop(every=7, drop_end=0.1) == DYNAMIC[name].itop(drop_end=0.1, every=7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Static(sparsity=1.2), "sparsity=1.2"),
        (lambda: Static(sparsity=-0.1), "sparsity=-0.1"),
        (lambda: RigL(drop_fraction=1.5), "drop_fraction=1.5"),
        (lambda: RigL(drop_end=-1), "drop_end=-1"),
        (lambda: RigL(every=0), "every=0"),
        (lambda: RigL(every=-0.1), "every=-0.1"),
        (lambda: RigL(every=1.5), "every=1.5"),
        (lambda: RigL(every=WRONG), "every='wrong': expected a number"),
        (lambda: GMP(initial_sparsity=WRONG), "initial_sparsity='wrong'"),
        (lambda: RigL(until=0), "begin < until"),
        (lambda: RigL(step_at_update=WRONG), 'expected "take" or "skip"'),
        (lambda: RigL(drop_decay=WRONG), "constant, linear, cosine"),
        (lambda: SET(criterion=WRONG), '"magnitude" or "signed"'),
        (lambda: SNFS(momentum=1.0), "momentum=1.0"),
        (lambda: MEST(gradient_weight=-1), "gradient_weight=-1"),
        (lambda: GMP(initial_sparsity=0.95, sparsity=0.9), "initial_sparsity=0.95"),
        (lambda: RigL().attach(*pair()), "RigL needs total_steps"),
        (lambda: RigL().attach(*pair(), total_steps=0), "total_steps=0"),
        (lambda: GMP(every=100).attach(*pair(), total_steps=50), "nothing would be pruned"),
        (lambda: GraNet(distribution={"*": 0.1}).attach(*pair(), total_steps=500), "initial_sparsity=0"),
        (lambda: ALGORITHMS["rigel"], 'did you mean "rigl"?'),
    ],
)
def test_wrong_options_are_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = perceptron()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_catalogue_describes_every_algorithm() -> None:
    lines = ALGORITHMS.describe()
    assert set(lines) == {
        "dense",
        "static",
        "set",
        "rigl",
        "srigl",
        "snfs",
        "mest",
        "gmp",
        "granet",
        "sr-ste",
        "hydra",
        "bsr-net",
    }
    assert all(lines.values())
