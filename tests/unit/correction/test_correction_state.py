"""A run that is killed and resumed within an epoch ends bit-equal to an uninterrupted one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from correction_helpers import Noisy, assert_same
from correction_oracle import cross_entropy, make_batches, perceptron
from equipoise.correction import (
    MVR,
    SAGA,
    SGD,
    SVRG,
    Agent,
    AgentMVR,
    AgentNoGamma,
    AlphaSVRG,
    Correction,
    Estimator,
    FixedC,
    Gradient,
    Loss,
)
from equipoise.errors import UserError
from equipoise.topology import GMP, SET, Algorithm, RigL
from equipoise.training import checkpoint

ESTIMATORS: dict[str, Estimator] = {
    "sgd": SGD(),
    "agent": Agent(),
    "agent, replay": Agent(mode="replay", coefficient=Loss(batch_fraction=1.0)),
    "agent, running": Agent(mode="running"),
    "no gamma, bf16 replay": AgentNoGamma(mode="replay", table="bf16", coefficient=Loss(batch_fraction=1.0)),
    "fixed, batch_fraction": FixedC(batch_fraction=0.4),
    "svrg, step_fraction": SVRG(step_fraction=0.5),
    "svrg, every 3 steps": SVRG(every=3),
    "alpha-svrg": AlphaSVRG(),
    "gradient": SVRG(coefficient="gradient"),
    "gradient per layer, running": SVRG(coefficient=Gradient(per_layer=True), mode="running"),
    "pays": SVRG(coefficient="gradient", when="pays", probe=3),
    "from epoch 1": SVRG(from_epoch=1),
    "mvr": MVR(),
    "agent-mvr": AgentMVR(),
    "saga": SAGA(),
    "saga, bf16": SAGA(table="bf16"),
}
ALGORITHMS: dict[str, Algorithm] = {
    "set": SET(sparsity=0.5, every=4),
    "rigl, corrected growth": RigL(sparsity=0.5, every=4, growth="corrected", until=1.0),
    "gmp": GMP(sparsity=0.5, every=4, until=1.0),
}
BATCHES, EPOCHS = 5, 4


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a state that are not containers."""
    items = (
        state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else None
    )
    if items is None:
        yield path
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a state with another value at a path."""
    if not path:
        return value
    new = list(state) if isinstance(state, tuple) else copy.copy(state)
    new[path[0]] = replaced(state[path[0]], path[1:], value)
    return type(state)(new)


class Run:
    """A training loop and its state."""

    def __init__(self, estimator: Estimator, algorithm: Algorithm) -> None:
        torch.manual_seed(0)
        self.model = Noisy()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.topology = algorithm.attach(self.model, self.optimizer, EPOCHS * BATCHES + 1)
        self.correction = estimator.attach(self.model, self.topology, total_steps=EPOCHS * BATCHES)
        self.batches = make_batches(BATCHES, size=8, dtype=torch.float32)
        self.losses: list[float] = []
        self.step = 0

    def train(self, until: int) -> None:
        estimator, correction = self.correction.estimator, self.correction
        while self.step < until:
            i = self.step % BATCHES
            if self.step % estimator.every == 0 if estimator.every else i == 0:
                coming = self.batches[i:] if estimator.mode == "replay" else self.batches
                correction.refresh(coming, cross_entropy, epoch=self.step // BATCHES)
            loss = correction.backward(cross_entropy, *self.batches[i], index=i)
            self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "topology", "correction")}
        return parts | {"random": torch.get_rng_state(), "step": self.step, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "topology", "correction"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        self.step, self.losses = state["step"], list(state["losses"])

    def outcome(self) -> list[Any]:
        masks = {name: mask.clone() for name, mask in self.topology.masks.items()}
        return [self.losses, self.model.state_dict(), masks, self.correction.report(), self.correction.passes]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_resuming_in_mid_epoch_is_bit_equal(name: str, algorithm: str, tmp_path: Path) -> None:
    estimator, chosen = ESTIMATORS[name], ALGORITHMS[algorithm]
    if estimator.mode in ("previous", "table") and isinstance(chosen, RigL):
        chosen = RigL(sparsity=0.5, every=4, until=1.0)
    whole = Run(estimator, chosen)
    files = {step: tmp_path / f"{step}.safetensors" for step in (2, 8, 13)}
    for step, file in files.items():
        whole.train(step)
        checkpoint.save(file, whole.state_dict())
    whole.train(EPOCHS * BATCHES)
    assert whole.topology.updates >= 4
    expected = whole.outcome()
    for file in files.values():
        torch.manual_seed(99)
        resumed = Run(estimator, chosen)
        with torch.no_grad():
            resumed.model.last.bias.add_(1)  # the state must replace the initial weights
        resumed.load_state_dict(checkpoint.load(file))
        resumed.train(EPOCHS * BATCHES)
        assert_same(expected, resumed.outcome())


def test_at_the_end_of_an_epoch_replay_stores_no_gradients() -> None:
    run = Run(SVRG(mode="replay"), SET(sparsity=0.5, every=4))
    run.train(3)
    assert len(run.correction.state_dict()["mode"]["rows"]) == 2
    run.train(5)
    assert run.correction.state_dict()["mode"] == {"expected": [], "rows": [], "randoms": [], "mean": None}


def test_a_state_may_be_loaded_twice() -> None:
    """Further training does not change the state that was loaded."""
    run = Run(SVRG(coefficient="gradient"), SET(sparsity=0.5, every=4))
    run.train(7)
    state = copy.deepcopy(run.state_dict())
    outcomes = []
    for _ in range(2):
        again = Run(SVRG(coefficient="gradient"), SET(sparsity=0.5, every=4))
        # Optimizers of torch do not copy the tensors of a state.
        again.load_state_dict(state | {"optimizer": copy.deepcopy(state["optimizer"])})
        again.train(14)
        outcomes.append(again.outcome())
    assert_same(*outcomes)


def test_the_state_of_another_correction_or_model_is_refused() -> None:
    model, batches = perceptron(), make_batches(4)

    def state(estimator: Estimator, model: Any) -> dict[str, Any]:
        correction: Correction = estimator.attach(model)
        correction.refresh(batches, cross_entropy)
        return correction.state_dict()

    with pytest.raises(UserError, match="the state belongs to SVRG and this correction is Agent"):
        Agent().attach(model).load_state_dict(state(SVRG(), model))
    with pytest.raises(UserError, match="another model"):
        Agent().attach(Noisy().double()).load_state_dict(state(Agent(), model))


def test_copies_train_on_their_own() -> None:
    run = Run(SVRG(), SET(sparsity=0.5, every=4))
    run.train(7)
    twin = copy.deepcopy(run)
    assert twin.correction.model is twin.model
    assert twin.correction.topology is twin.topology
    random = torch.get_rng_state()
    twin.train(15)
    weights = [p.detach().clone() for p in run.model.parameters()]
    torch.set_rng_state(random)
    assert_same(weights, [p.detach() for p in run.model.parameters()])
    run.train(15)
    assert_same(run.outcome(), twin.outcome())


def test_a_checkpoint_can_hold_the_state(tmp_path: Path) -> None:
    """Stored gradients have the size of the active weights."""
    run = Run(SVRG(mode="replay", table="bf16"), SET(sparsity=0.8, every=100))
    run.train(2)
    state = run.correction.state_dict()
    checkpoint.save(tmp_path / "c.safetensors", state)
    active = run.topology.active + sum(p.numel() for p in run.model.parameters() if p.dim() == 1)
    rows: list[Tensor] = state["mode"]["rows"]
    assert [(row.numel(), row.dtype) for row in rows] == [(active, torch.bfloat16)] * 3
    assert state["snapshot"] == {}, "replay with a fixed weight keeps no old weights"


@pytest.mark.parametrize("wrong", ["word", [1.0], torch.ones(2, 3), None], ids=["word", "list", "tensor", "none"])
@pytest.mark.parametrize("name", ["agent, replay", "gradient per layer, running", "pays", "agent-mvr", "saga"])
def test_a_state_with_a_wrong_value_is_refused_or_trains(name: str, wrong: Any) -> None:
    run = Run(ESTIMATORS[name], ALGORITHMS["set"])
    run.train(7)
    state = run.correction.state_dict()
    parts = ("counters", "active_vector", "coefficient", "mode", "statistics", "loss_pairs", "decision")
    for path in leaves({part: state[part] for part in parts}):
        again = copy.deepcopy(run)
        try:
            again.correction.load_state_dict(replaced(state, path, wrong))
        except (UserError, TypeError, AttributeError, ValueError, RuntimeError, LookupError):
            continue  # the reader of a checkpoint turns all of them into one line
        with contextlib.suppress(UserError):
            again.train(9)
        again.correction.report()
