"""One line for a loss function or an argument that a correction cannot use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from correction_oracle import cross_entropy, make_batches, perceptron
from equipoise.correction import SGD, SVRG, Agent, AlphaSVRG, Correction
from equipoise.errors import UserError
from equipoise.topology import RigL, Static

WRITE = "); write `def loss_fn(model, x, y): return cross_entropy(model(x), y)`"
TAKES = "the loss function does not take the model and the 2 arguments of the batch ("

LOSSES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "without the model": (lambda logits, labels: F.cross_entropy(logits, labels), TAKES, WRITE),
    "functional": (F.cross_entropy, TAKES, WRITE),
    "module": (nn.CrossEntropyLoss(), TAKES, WRITE),
    "no mean": (
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"),
        "the loss has the shape (4,); ",
        "it must be one number, such as the mean over the batch",
    ),
    "tuple": (
        lambda model, x, y: (cross_entropy(model, x, y), model(x)),
        "the loss function returned a tuple; ",
        "it must return the mean loss, a tensor",
    ),
    "number": (
        lambda model, x, y: 1.0,
        "the loss function returned a float; ",
        "it must return the mean loss, a tensor",
    ),
}


def plain(correction: Correction, loss_fn: Any, batches: list[Any]) -> None:
    SGD().attach(correction.model).backward(loss_fn, *batches[0])


def refreshing(correction: Correction, loss_fn: Any, batches: list[Any]) -> None:
    correction.refresh(batches, loss_fn)


def correcting(correction: Correction, loss_fn: Any, batches: list[Any]) -> None:
    correction.refresh(batches, cross_entropy)
    correction.correct(loss_fn, *batches[0])


@pytest.mark.parametrize("use", [plain, refreshing, correcting])
@pytest.mark.parametrize("case", LOSSES)
def test_a_wrong_loss_function_is_one_line(case: str, use: Callable[..., None]) -> None:
    loss_fn, begins, ends = LOSSES[case]
    with pytest.raises(UserError) as error:
        use(SVRG().attach(perceptron()), loss_fn, make_batches(3))
    assert str(error.value).startswith(begins)
    assert str(error.value).endswith(ends)
    assert "\n" not in str(error.value)


def test_a_type_error_of_the_user_stays_one() -> None:
    def faulty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        SVRG().attach(perceptron()).refresh(make_batches(3), faulty)


def test_wrong_arguments_of_attach() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = Static().attach(model, optimizer)
    call = "Agent().attach(model, topology): "
    wrong: list[tuple[Any, Any, str]] = [
        (model, optimizer, "the topology is a SGD; leave it out, or pass what RigL().attach() returned"),
        (topology, model, "the model is a Topology; pass a torch.nn.Module"),
        (model, RigL(), "pass what RigL(...).attach(model, optimizer) returned"),
        (model, Static, "the topology is a class, Static; leave it out, or pass what RigL().attach() returned"),
        (None, None, "the model is a NoneType; pass a torch.nn.Module"),
    ]
    for first, second, message in wrong:
        with pytest.raises(UserError) as error:
            Agent().attach(first, second)
        assert str(error.value) == call + message


def messages(function: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def test_a_step_before_the_first_refresh_is_warned_about_once() -> None:
    model, batches = perceptron(), make_batches(3)

    def epoch(correction: Correction) -> None:
        for batch in batches:
            correction.backward(cross_entropy, *batch)

    correction = Agent().attach(model)
    expected = "a step before the first refresh is not corrected; call refresh(batches, loss_fn) first"
    assert messages(lambda: epoch(correction)) == [expected]
    assert messages(lambda: epoch(correction)) == []
    correction.refresh(batches, cross_entropy)
    resumed = Agent().attach(model)
    resumed.load_state_dict(correction.state_dict())
    for other in (correction, resumed, SGD().attach(model)):
        assert messages(lambda other=other: epoch(other)) == []  # type: ignore[misc]
    assert messages(lambda: Agent().attach(model).correct(cross_entropy, *batches[0])) == [expected]


def test_steps_past_the_end_are_warned_about_once() -> None:
    model, batches = perceptron(), make_batches(4)
    correction = AlphaSVRG().attach(model, total_steps=3)
    correction.refresh(batches, cross_entropy)

    def step(i: int) -> list[str]:
        return messages(lambda: correction.backward(cross_entropy, *batches[i]))

    assert [step(i) for i in (0, 1, 2, 3, 3)] == [
        [],
        [],
        [],
        ["step 4 is past total_steps=3; attach with the number of steps"],
        [],
    ]


def test_a_correction_says_what_it_is() -> None:
    model, batches = perceptron(), make_batches(3)
    correction = Agent(mode="replay").attach(model)
    assert repr(correction) == "<Agent, replay: gamma 0.1, 0 steps, 0 refreshes, does not correct the next>"
    correction.refresh(batches, cross_entropy)
    correction.backward(cross_entropy, *batches[0])
    assert repr(correction) == "<Agent, replay: gamma 0.1, 1 steps, 1 refreshes, corrects the next>"
