"""With weight 0 a corrected run is bit-equal to plain training."""

from __future__ import annotations

from typing import Any

import pytest

from correction_helpers import assert_same, attached, loader, streams
from correction_oracle import cross_entropy
from equipoise.correction import MVR, SAGA, SVRG, Agent, AgentMVR, AlphaSVRG, Estimator, Fixed, Gradient, Linear


def train(estimator: Estimator | None, epochs: int = 3) -> list[Any]:
    """Train with a loader that shuffles by the global generator; None is a loop without a correction."""
    model, optimizer, topology, correction = attached(estimator or SVRG())
    batches = loader()
    losses = []
    for _ in range(epochs):
        if estimator is not None:
            correction.refresh(batches, cross_entropy)
        for i, (x, y) in enumerate(batches):
            if estimator is None:
                loss = cross_entropy(model, x, y)
                loss.backward()
            else:
                loss = correction.backward(cross_entropy, x, y, index=i)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return [losses, model.state_dict(), optimizer.state_dict(), topology.masks, streams()]


@pytest.mark.parametrize(
    "estimator",
    [
        SVRG(coefficient=Fixed(0.0)),
        SVRG(coefficient=Fixed(0.0), mode="replay"),
        SVRG(coefficient=Fixed(0.0), mode="running"),
        SVRG(coefficient=Fixed(0), step_fraction=0.5),
        SVRG(coefficient=Fixed(0.0), batch_fraction=0.4),
        AlphaSVRG(coefficient=Linear(0.0)),
        Agent(gamma=0.0),
        Agent(gamma=0.0, mode="replay"),
        Agent(gamma=0.0, when="pays", probe=2),
        SVRG(gamma=0.0, coefficient="gradient"),
        SVRG(gamma=0.0, coefficient=Gradient(per_layer=True), mode="running"),
        MVR(coefficient=Fixed(0.0)),
        AgentMVR(gamma=0.0),
        SAGA(coefficient=Fixed(0.0)),
        SVRG(from_epoch=9),
    ],
    ids=str,
)
def test_with_weight_zero_a_run_is_plain_training(estimator: Estimator) -> None:
    assert_same(train(None), train(estimator))


def test_with_another_weight_it_is_not() -> None:
    plain, corrected = train(None), train(SVRG(coefficient=Fixed(0.5)))
    assert plain[0] != corrected[0]
    assert plain[4] == corrected[4], "but it draws the same random numbers"
