"""Every step of every estimator equals its formula in numpy, over refreshes and changing masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from correction_oracle import (
    GradientRule,
    LossRule,
    Oracle,
    assert_follows,
    cross_entropy,
    gradient,
    gradient_of,
    make_batches,
    perceptron,
    vector_of,
)
from equipoise.correction import (
    CORRECTIONS,
    MVR,
    SAGA,
    SGD,
    SVRG,
    Agent,
    AgentMVR,
    AgentNoGamma,
    AgentReducedRate,
    AlphaSVRG,
    Estimator,
    FixedC,
    Gradient,
    Linear,
    Loss,
)
from equipoise.correction.full_pass import choose_batches
from equipoise.topology import GMP, SET, Static, Topology

STEPS = 20

CASES: dict[str, tuple[Estimator, Callable[[], Oracle]]] = {
    "sgd": (SGD(), lambda: Oracle("none", 0.0)),
    "agent": (Agent(), lambda: Oracle("recompute", LossRule(), 0.1)),
    "agent, other numbers": (
        Agent(gamma=0.7, coefficient=Loss(smoothing=0.6)),
        lambda: Oracle("recompute", LossRule(0.6), 0.7),
    ),
    "agent, no clamp": (
        Agent(coefficient=Loss(clamp=False), gamma=1),
        lambda: Oracle("recompute", LossRule(clamp=False), 1),
    ),
    "agent, replay": (
        Agent(mode="replay", coefficient=Loss(batch_fraction=1.0)),
        lambda: Oracle("replay", LossRule(), 0.1),
    ),
    "agent, running": (Agent(mode="running"), lambda: Oracle("running", LossRule(), 0.1)),
    "agent, gradient": (Agent(coefficient="gradient"), lambda: Oracle("recompute", GradientRule(), 0.1)),
    "no gamma": (AgentNoGamma(), lambda: Oracle("recompute", LossRule(), 1)),
    "reduced rate": (AgentReducedRate(), lambda: Oracle("recompute", LossRule(), 1)),
    "fixed": (FixedC(), lambda: Oracle("recompute", 0.1)),
    "svrg": (SVRG(), lambda: Oracle("recompute", 1.0)),
    "svrg, replay": (SVRG(mode="replay"), lambda: Oracle("replay", 1.0)),
    "svrg, running": (SVRG(mode="running"), lambda: Oracle("running", 1.0)),
    "alpha-svrg": (AlphaSVRG(), lambda: Oracle("recompute", lambda t: 0.75 * (1 - t / STEPS))),
    "alpha-svrg, replay": (AlphaSVRG(mode="replay"), lambda: Oracle("replay", lambda t: 0.75 * (1 - t / STEPS))),
    "gradient": (SVRG(coefficient="gradient"), lambda: Oracle("recompute", GradientRule())),
    "gradient, replay": (
        SVRG(coefficient=Gradient(memory=0.5), mode="replay"),
        lambda: Oracle("replay", GradientRule(0.5)),
    ),
    "gradient, running": (
        SVRG(coefficient=Gradient(memory=0.7), mode="running"),
        lambda: Oracle("running", GradientRule(0.7)),
    ),
    "gradient per layer": (
        SVRG(coefficient=Gradient(per_layer=True)),
        lambda: Oracle("recompute", GradientRule(per_layer=True)),
    ),
    "gradient per layer, running": (
        SVRG(coefficient=Gradient(per_layer=True), mode="running"),
        lambda: Oracle("running", GradientRule(per_layer=True)),
    ),
    "mvr": (MVR(), lambda: Oracle("previous", 0.9)),
    "mvr, linear": (
        MVR(coefficient=Linear(0.5)),
        lambda: Oracle("previous", lambda t: 0.5 * (1 - t / STEPS)),
    ),
    "agent-mvr": (AgentMVR(gamma=0.8), lambda: Oracle("previous", LossRule(), 0.8)),
    "saga": (SAGA(), lambda: Oracle("table", 1.0)),
    "saga, gradient": (SAGA(coefficient="gradient"), lambda: Oracle("table", GradientRule())),
}

TOPOLOGIES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Topology | None]] = {
    "dense": lambda model, optimizer: None,
    "static": lambda model, optimizer: Static(sparsity=0.5).attach(model, optimizer),
    # Masks change within and between epochs of five steps.
    "set": lambda model, optimizer: SET(sparsity=0.5, every=3, drop_fraction=0.3).attach(model, optimizer, STEPS + 1),
    "gmp": lambda model, optimizer: GMP(sparsity=0.6, every=3).attach(model, optimizer, STEPS + 1),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_the_formula(case: str, topology: str) -> None:
    estimator, make_oracle = CASES[case]
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5, weight_decay=0.01)
    attached = TOPOLOGIES[topology](model, optimizer)
    correction = estimator.attach(model, attached, total_steps=STEPS)
    corrected = assert_follows(make_oracle(), correction, optimizer, make_batches(), epochs=4)
    if attached is not None and topology in ("set", "gmp"):
        assert attached.updates >= 4
    if estimator.corrects:
        assert corrected >= 5, "the test would not see a correction that does nothing"
    else:
        assert corrected == 0


def test_every_registered_correction_is_tested() -> None:
    assert {type(estimator) for estimator, _ in CASES.values()} == set(CORRECTIONS.values())


@pytest.mark.parametrize("coefficient", ["loss", "fixed", "gradient"])
def test_a_fraction_of_the_batches_replaces_all(coefficient: str) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    topology = SET(sparsity=0.5, every=3).attach(model, optimizer, 30)
    correction = SVRG(coefficient=coefficient, batch_fraction=0.5).attach(model, topology, seed=7)
    drawn = [sorted(choose_batches(6, 0.5, 7, refresh) or ()) for refresh in (1, 2, 3, 4)]
    rule = {"loss": LossRule(), "fixed": 1.0, "gradient": GradientRule()}[coefficient]
    corrected = assert_follows(Oracle("recompute", rule, fraction=drawn), correction, optimizer, make_batches(6))
    assert corrected > 10
    assert [len(subset) for subset in drawn] == [3, 3, 3, 3]
    assert len(set(map(tuple, drawn))) > 1, "always the same batches"


def test_replay_and_recompute_give_the_same_gradients() -> None:
    runs = []
    for mode in ("recompute", "replay"):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        topology = SET(sparsity=0.5, every=4).attach(model, optimizer, 40)
        correction = Agent(gamma=0.9, mode=mode, coefficient=Loss(batch_fraction=1.0)).attach(model, topology)
        found = []
        for _ in range(4):
            correction.refresh(make_batches(), cross_entropy)
            for batch in make_batches():
                correction.backward(cross_entropy, *batch)
                found.append(gradient_of(model))
                optimizer.step()
                optimizer.zero_grad()
        runs.append(np.array(found))
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-10, atol=1e-13)


def test_a_fraction_of_the_steps_is_corrected() -> None:
    """A quarter of the steps, evenly spread; the others are plain and cost one pass."""
    model = perceptron()
    correction = SVRG(step_fraction=0.25).attach(model)
    batches = make_batches(12)
    correction.refresh(batches, cross_entropy)
    forward = correction.passes["forward"]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    changed = []
    for batch in batches:
        model.zero_grad()
        correction.backward(cross_entropy, *batch)
        changed.append(not np.allclose(gradient_of(model), gradient(vector_of(model), batch), atol=1e-9))
    assert changed == [False, False, False, True] * 3
    assert correction.passes["forward"] - forward == 12 + 3


def test_refreshing_every_few_steps() -> None:
    """A snapshot may be taken within an epoch."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    correction = SVRG().attach(model)
    batches = make_batches(6)
    for step, batch in enumerate(batches * 2):
        if step % 4 == 0:
            correction.refresh(batches, cross_entropy)
            old = vector_of(model)
            full = np.mean([gradient(old, b) for b in batches], axis=0)
        expected = gradient(vector_of(model), batch) - gradient(old, batch) + full
        correction.backward(cross_entropy, *batch)
        np.testing.assert_allclose(gradient_of(model), expected, rtol=1e-10, atol=1e-12)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["recompute", "replay"])
def test_losses_are_compared_on_a_fraction_of_the_batches(mode: str) -> None:
    """All batches with recompute, as in the paper; a tenth with replay, but at least eight."""
    model = perceptron()
    for count, expected in ((40, {"recompute": 40, "replay": 8}), (200, {"recompute": 200, "replay": 20})):
        correction = Agent(mode=mode).attach(model)  # type: ignore[arg-type]
        batches = make_batches(count)
        correction.refresh(batches, cross_entropy)
        assert correction.passes == {"forward": count, "backward": count}, "there is nothing to compare with yet"
        assert "c_hat" not in correction.report()
        with torch.no_grad():
            model.last.weight.mul_(0.9)
        correction.refresh(batches, cross_entropy)
        assert correction.passes == {"forward": 2 * count + expected[mode], "backward": 2 * count}
        assert 0 < correction.report()["c_hat"] <= 1


def test_passes_are_counted_as_the_cost_says() -> None:
    """One epoch of each mode; a backward pass counts two."""
    batches = make_batches(8)
    for estimator in (
        SGD(),
        SVRG(),
        SVRG(mode="replay"),
        SVRG(mode="running"),
        Agent(),
        SAGA(),
        MVR(),
        SVRG(batch_fraction=0.5),
    ):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        correction = estimator.attach(model)
        for epoch in range(2):
            before = dict(correction.passes)
            correction.refresh(batches, cross_entropy)
            for i, batch in enumerate(batches):
                correction.backward(cross_entropy, *batch, index=i)
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 1:
                spent = {name: correction.passes[name] - before[name] for name in before}
                assert (spent["forward"] + 2 * spent["backward"]) / (3 * len(batches)) == pytest.approx(
                    estimator.cost
                )
