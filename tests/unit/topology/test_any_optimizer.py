"""Every optimizer of torch that takes dense gradients, found by looking into torch.optim."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import UserError
from equipoise.sparse import pack
from equipoise.topology import GMP, SET, Algorithm, BSRNet, Dynamic, GraNet, RigL, Topology
from topology_helpers import SPARSE, assert_sparse, attach, perceptron, train


def takes_dense_gradients(kind: type[Optimizer]) -> bool:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    try:
        kind([weight]).step(lambda: 0.0)  # type: ignore[call-arg]
    except RuntimeError as error:
        assert "does not support dense gradients" in str(error)  # noqa: PT017
        return False
    return True


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer and takes_dense_gradients(kind)
}


def make(name: str, model: nn.Module) -> Optimizer:
    """With weight decay and momentum wherever the optimizer has them: what would revive a weight if anything did."""
    known = inspect.signature(OPTIMIZERS[name]).parameters
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    return OPTIMIZERS[name](model.parameters(), **{k: v for k, v in options.items() if k in known})


def states(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape]


def test_the_search_finds_the_optimizers() -> None:
    assert {"SGD", "Adam", "AdamW", "Adafactor", "Muon", "LBFGS", "ASGD", "Rprop", "RMSprop"} <= set(OPTIMIZERS)
    assert "SparseAdam" not in OPTIMIZERS


def follow(model: nn.Module, optimizer: Optimizer, topology: Topology, steps: int) -> None:
    """Train; after every step what is inactive is zero and what has just grown starts from nothing."""
    for step in range(steps):
        before = topology.masks
        train(model, optimizer, range(step, step + 1))
        assert_sparse(topology)
        for layer in topology.layers:
            grown = layer.mask() & ~before[layer.name]
            assert torch.count_nonzero(layer.parameter.detach()[grown]) == 0
            for key, state in optimizer.state.get(layer.parameter, {}).items():
                if isinstance(state, Tensor) and state.shape == layer.parameter.shape:
                    newborn = optimizer.param_groups[0]["lr"] if key == "step_size" else 0.0  # Rprop's first step
                    assert (state[grown] == newborn).all(), key


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", [name for name in SPARSE if name != "bsr-net"])  # whose newborns are not zero
def test_inactive_weights_stay_zero_and_grown_ones_start_there(name: str, algorithm: str) -> None:
    model = perceptron(bias=name != "Muon")  # which takes matrices only
    optimizer = make(name, model)
    topology = attach(algorithm, model, optimizer, 20, sparsity=0.7)
    first, dense = topology.masks, [p.detach().clone() for p in model.parameters()]
    follow(model, optimizer, topology, 8)
    assert any(not torch.equal(old, new) for old, new in zip(dense, model.parameters(), strict=True))
    moved = any(not torch.equal(first[layer.name], layer.mask()) for layer in topology.layers)
    assert moved == (algorithm != "static")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_everything_untouched(name: str) -> None:
    model = perceptron(bias=name != "Muon")
    optimizer = make(name, model)
    topology = RigL(sparsity=0.7, every=3).attach(model, optimizer, total_steps=20)
    train(model, optimizer, range(2))
    assert topology.update_is_next
    before = topology.masks
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept_states = {name: [s.clone() for s in states(optimizer, p)] for name, p in model.named_parameters()}
    counters = [state["step"].clone() for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]
    train(model, optimizer, range(2, 3))
    assert topology.updates == 1
    for key, parameter in model.named_parameters():
        kept = before[key] & topology.masks[key] if key in before else torch.ones_like(parameter, dtype=torch.bool)
        assert torch.equal(parameter.detach()[kept], weights[key][kept])
        assert parameter.grad is not None  # given back
        for old, new in zip(kept_states[key], states(optimizer, parameter), strict=True):
            assert torch.equal(old[kept], new[kept])
    now = [state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]
    assert name == "LBFGS" or all(torch.equal(a, b) for a, b in zip(counters, now, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ["set", "rigl", "snfs"])
def test_the_optimizer_sees_the_gradient_of_active_weights_only(name: str, algorithm: str) -> None:
    """At update steps too, and whether gradients come from a closure or from before: no state outside the mask."""
    model = perceptron(bias=name != "Muon")
    optimizer = make(name, model)
    topology = attach(algorithm, model, optimizer, 40, sparsity=0.7, step_at_update="take")
    constants = {"step_size", "exp_inf"}  # Rprop's and Adamax's are not zero even where no gradient ever was
    for step in range(7):
        before = topology.masks
        train(model, optimizer, range(step, step + 1))
        for layer in topology.layers:
            for key, state in optimizer.state.get(layer.parameter, {}).items():
                if isinstance(state, Tensor) and state.shape == layer.parameter.shape and key not in constants:
                    hidden = ~before[layer.name] & ~layer.mask()
                    assert torch.count_nonzero(state[hidden]) == 0, key


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False, "weight_decay": 0.1}),
        ("Adam", {"amsgrad": True, "foreach": True}),
        ("AdamW", {"amsgrad": True, "fused": True, "weight_decay": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("LBFGS", {"line_search_fn": "strong_wolfe", "history_size": 3}),
    ],
)
def test_variants_of_an_optimizer(name: str, options: dict[str, Any]) -> None:
    model = perceptron()
    optimizer = OPTIMIZERS[name](model.parameters(), **options)
    topology = RigL(sparsity=0.7, every=3, step_at_update="take").attach(model, optimizer, total_steps=30)
    follow(model, optimizer, topology, 12)
    assert topology.updates == 4


def test_lbfgs_forgets_the_curvature_of_the_old_topology() -> None:
    model = perceptron()
    optimizer = make("LBFGS", model)
    topology = SET(sparsity=0.7, every=3).attach(model, optimizer, total_steps=30)
    train(model, optimizer, range(2))
    assert optimizer.state
    train(model, optimizer, range(2, 3))
    assert topology.updates == 1
    assert not optimizer.state


@pytest.mark.parametrize("algorithm", [GMP(every=2), GraNet(every=2), BSRNet(distribution="erk")])
def test_lbfgs_follows_packed_weights_that_move_or_become_fewer(algorithm: Algorithm) -> None:
    model = pack(perceptron(), algorithm)
    optimizer = make("LBFGS", model)
    topology = algorithm.attach(model, optimizer, total_steps=12)
    train(model, optimizer, range(12))
    assert topology.updates > 3
    assert not optimizer.state or topology.window is not None
    assert topology.active == sum(layer.final for layer in topology.layers)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_closure_and_a_backward_pass_before_the_step_are_the_same() -> None:
    def run(with_closure: bool, algorithm: Dynamic) -> nn.Module:
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        algorithm.attach(model, optimizer, total_steps=20)
        if with_closure:
            train(model, optimizer, range(9))
            return model
        for step in range(9):
            optimizer.zero_grad()
            train(model, NoStep(optimizer), range(step, step + 1))
            optimizer.step()
        return model

    for algorithm in (RigL(every=3), RigL(every=3, step_at_update="take"), SET(every=3, step_at_update="skip")):
        for left, right in zip(run(True, algorithm).parameters(), run(False, algorithm).parameters(), strict=True):
            assert torch.equal(left, right)


class NoStep:
    """Runs a closure and takes no step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.zero_grad = optimizer.zero_grad

    def step(self, closure: Any) -> None:
        closure()


def test_a_weight_that_another_optimizer_moves_is_refused() -> None:
    model = perceptron()
    optimizer = torch.optim.Muon([model.first.weight])
    with pytest.raises(
        UserError, match=r'the optimizer does not have "last.weight"; pass it to the optimizer or exclude it'
    ):
        SET().attach(model, optimizer, total_steps=10)
    assert all(torch.count_nonzero(p) == p.numel() for p in model.parameters())  # nothing was changed
    assert list(SET(exclude=("last",)).attach(model, optimizer, total_steps=1000).masks) == ["first.weight"]
