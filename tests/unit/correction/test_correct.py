"""`correct` after a backward pass of the caller gives the numbers of `backward`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from correction_helpers import Noisy, assert_same, streams
from correction_oracle import Batch, cross_entropy, make_batches, perceptron
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, Correction, Estimator, Gradient
from equipoise.topology import SET, RigL

ESTIMATORS: dict[str, Estimator] = {
    "recompute": Agent(gamma=0.8),
    "replay": Agent(gamma=0.8, mode="replay"),
    "running": Agent(gamma=0.8, mode="running"),
    "gradient": SVRG(coefficient=Gradient(per_layer=True)),
    "half": SVRG(step_fraction=0.5),
    "later": SVRG(from_epoch=1),
    "mvr": MVR(),
    "saga": SAGA(),
    "sgd": SGD(),
}
Step = Callable[[Correction, Batch, float, int, Callable[[], None]], None]


def by_backward(correction: Correction, batch: Batch, scale: float, index: int, clear: Callable[[], None]) -> None:
    clear()
    correction.backward(cross_entropy, *batch, scale=scale, index=index)


def by_correct(correction: Correction, batch: Batch, scale: float, index: int, clear: Callable[[], None]) -> None:
    clear()
    correction.before_forward()
    loss = cross_entropy(correction.model, *batch)
    (loss * scale).backward()
    correction.correct(cross_entropy, *batch, scale=scale, index=index, loss=loss)


def as_lightning(correction: Correction, batch: Batch, scale: float, index: int, clear: Callable[[], None]) -> None:
    """Gradients are cleared between forward and backward."""
    correction.before_forward()
    loss = cross_entropy(correction.model, *batch)
    clear()
    (loss * scale).backward()
    correction.correct(cross_entropy, *batch, scale=scale, index=index, loss=loss)


def train(step: Step, estimator: Estimator, storage: str, parts: int, set_to_none: bool = True) -> list[Any]:
    """Three epochs of a model with dropout and BatchNorm on moving masks; everything that they leave."""
    torch.manual_seed(0)
    dtype = torch.float32 if storage == "packed" else torch.float64
    growth = "batch" if storage == "packed" or estimator.mode in ("previous", "table") else "corrected"
    algorithm = RigL(sparsity=0.5, every=2, growth=growth)
    model: nn.Module = Noisy().to(dtype)
    if storage == "packed":
        model = eq.sparse.pack(model, algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    topology = algorithm.attach(model, optimizer, total_steps=18 // parts)
    correction = estimator.attach(model, topology)
    batches = make_batches(6, size=8, dtype=dtype)
    seen = []
    for _ in range(3):
        correction.refresh(batches, cross_entropy)
        for i, batch in enumerate(batches):
            cleared = (lambda: optimizer.zero_grad(set_to_none)) if i % parts == 0 else (lambda: None)
            step(correction, batch, 1 / parts, i, cleared)
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            if (i + 1) % parts == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        seen.append(correction.report())
    assert topology.updates
    return [seen, model.state_dict(), optimizer.state_dict(), correction.state_dict(), streams()]


@pytest.mark.parametrize("storage", ["masked", "packed"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [(name, parts) for name in ESTIMATORS for parts in (1, 3) if (name, parts) != ("mvr", 3)],  # MVR: whole batches
)
def test_the_numbers_are_those_of_backward(name: str, storage: str, parts: int) -> None:
    expected = train(by_backward, ESTIMATORS[name], storage, parts)
    assert_same(train(by_correct if parts == 1 else as_lightning, ESTIMATORS[name], storage, parts), expected)


def test_gradients_that_are_cleared_to_zeros_are_cleared() -> None:
    estimator = ESTIMATORS["gradient"]
    expected = train(by_backward, estimator, "masked", 2, set_to_none=False)
    assert_same(train(by_correct, estimator, "masked", 2, set_to_none=False), expected)


def test_a_loss_that_is_not_given_is_computed_again() -> None:
    """`running` with a loss coefficient: one more forward pass a step, the same coefficient, no trace."""
    found = []
    for given in (True, False):
        torch.manual_seed(0)
        model, batches = Noisy().double(), make_batches(6, size=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        correction = Agent(gamma=0.8, mode="running").attach(model)
        for _ in range(3):
            correction.refresh(batches, cross_entropy)
            for batch in batches:
                optimizer.zero_grad()
                correction.before_forward()
                loss = cross_entropy(model, *batch)
                loss.backward()
                correction.correct(cross_entropy, *batch, loss=loss if given else None)
                optimizer.step()
        found.append([model.state_dict(), correction.weight, correction.state_dict()["loss_pairs"], streams()])
        assert correction.passes == {"forward": 36 + (0 if given else 18), "backward": 36}
    assert float(found[0][1]) != 0
    assert_same(*found)


def test_dropout_without_before_forward_is_warned_about_once() -> None:
    torch.manual_seed(0)
    model, batches = Noisy().double(), make_batches(4, size=8)
    correction = SVRG().attach(model)
    correction.refresh(batches, cross_entropy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            before = torch.get_rng_state()
            cross_entropy(model, *batch).backward()
            after = torch.get_rng_state()
            correction.correct(cross_entropy, *batch)
            assert torch.equal(torch.get_rng_state(), after)
            assert not torch.equal(before, after)
    assert [w.filename for w in caught] == [__file__]
    assert "call before_forward() before the forward pass" in str(caught[0].message)


def test_a_model_without_dropout_needs_correct_only() -> None:
    found = []
    for step in (by_backward, None):
        model, batches = perceptron(), make_batches(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        SET(sparsity=0.5, every=3).attach(model, optimizer, 16)
        correction = Agent(gamma=0.8).attach(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                correction.refresh(batches, cross_entropy)
                for batch in batches:
                    if step is None:
                        cross_entropy(model, *batch).backward()
                        correction.correct(cross_entropy, *batch)
                    else:
                        step(correction, batch, 1.0, 0, lambda: None)
                    optimizer.step()
                    optimizer.zero_grad()
        found.append([model.state_dict(), correction.state_dict()])
    assert_same(*found)


def test_a_copy_of_an_agent_in_the_middle_of_an_epoch_continues() -> None:
    torch.manual_seed(0)
    model, batches = Noisy().double(), make_batches(6, size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = SVRG(coefficient="gradient").attach(model)
    correction.refresh(batches, cross_entropy)
    for batch in batches[:3]:
        by_correct(correction, batch, 1.0, 0, optimizer.zero_grad)
        optimizer.step()
    random = torch.get_rng_state()
    copies = copy.deepcopy((model, optimizer, correction))
    ends = []
    for net, opt, agent in ((model, optimizer, correction), copies):
        torch.set_rng_state(random)
        for batch in batches[3:]:
            as_lightning(agent, batch, 1.0, 0, opt.zero_grad)
            opt.step()
        ends.append([net.state_dict(), agent.report()])
    assert_same(*ends)


def test_misuse_is_refused_as_by_backward() -> None:
    model, batches = perceptron(), make_batches(4)
    mvr = MVR().attach(model)
    with pytest.raises(eq.UserError, match="without micro-batches"):
        mvr.correct(cross_entropy, *batches[0], scale=0.5)
    replay = replace(ESTIMATORS["replay"]).attach(model)
    replay.refresh(batches, cross_entropy)
    cross_entropy(model, *batches[1]).backward()
    with pytest.raises(eq.UserError, match="replay got another batch"):
        replay.correct(cross_entropy, *batches[1])
    model.eval()
    with pytest.raises(eq.UserError, match="refresh ran in training mode"):
        replay.correct(cross_entropy, *batches[0])


def half_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(inputs), labels)


def test_bf16_autocast() -> None:
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        model, batches = Noisy(), make_batches(4, size=8, dtype=torch.float32)
        correction = SVRG().attach(model)
        for _ in range(2):
            correction.refresh(batches, half_loss)
            for batch in batches:
                model.zero_grad()
                if own:
                    correction.before_forward()
                    half_loss(model, *batch).backward()
                    correction.correct(half_loss, *batch)
                else:
                    correction.backward(half_loss, *batch)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
        found.append(model.state_dict())
    assert_same(*found)
