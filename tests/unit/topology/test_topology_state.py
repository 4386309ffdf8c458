"""Masks that survive saving, loading and copying."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from equipoise.errors import UserError
from equipoise.sparse import pack
from equipoise.topology import ALGORITHMS, SET, RigL, Static, Topology
from equipoise.topology.ema import EMA
from topology_helpers import SPARSE, Made, assert_same_tensors, assert_sparse, attach, backward, perceptron, train


def make(algorithm: str, seed: int = 0) -> Made:
    model = perceptron(seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, optimizer, attach(algorithm, model, optimizer, 30, sparsity=0.7)


def assert_same(left: Made, right: Made) -> None:
    assert_same_tensors(left[0], right[0])
    for a, b in zip(left[2].layers, right[2].layers, strict=True):
        assert torch.equal(a.activity, b.activity)
        assert a.active == b.active
    assert (left[2].steps, left[2].updates) == (right[2].steps, right[2].updates)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Loaded without executing code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("algorithm", SPARSE)
@pytest.mark.parametrize("saved_at", [0, 2, 3, 7])
def test_a_run_that_is_saved_and_loaded_goes_on_bit_equal(algorithm: str, saved_at: int) -> None:
    whole = make(algorithm)
    train(whole[0], whole[1], range(saved_at))
    model, optimizer, topology = whole
    state = through_a_file(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "topology": topology.state_dict()}
    )
    resumed = make(algorithm, seed=5)  # other weights; the rest comes from the file
    resumed[0].load_state_dict(state["model"])
    resumed[1].load_state_dict(state["optimizer"])
    resumed[2].load_state_dict(state["topology"])
    assert_same(whole, resumed)
    assert whole[2].exploration == resumed[2].exploration
    for made in (whole, resumed):
        train(made[0], made[1], range(saved_at, 14))
    assert_same(whole, resumed)
    assert_sparse(resumed[2])


def test_a_loaded_topology_does_not_share_its_tensors() -> None:
    left, right = make("snfs"), make("snfs")
    train(left[0], left[1], range(4))
    right[2].load_state_dict(left[2].state_dict())
    kept = copy.deepcopy(right[2].state_dict())
    train(left[0], left[1], range(4, 8))
    now = right[2].state_dict()
    assert_same_state(kept, now)


def assert_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name, state in left["layers"].items():
        assert all(torch.equal(tensor, right["layers"][name][part]) for part, tensor in state.items())
    assert all(torch.equal(tensor, right["memory"][name]) for name, tensor in left["memory"].items())


def other_model() -> Topology:
    model = perceptron(classes=6)
    return RigL(every=3).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), 30)


def fewer_layers() -> Topology:
    model = perceptron()
    return RigL(every=3, exclude=("last",)).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), 30)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: other_model().state_dict(), 'the mask of "last.weight" has shape (6, 24), the weight has (5, 24)'),
        (lambda: fewer_layers().state_dict(), 'other sparse weights than the model, such as "last.weight"'),
        (lambda: make("set")[2].state_dict(), "the state is of SET, this topology is RigL"),
        (lambda: perceptron().state_dict(), 'not the state of a topology: it has no "algorithm"'),
    ],
    ids=["shape", "layers", "algorithm", "nonsense"],
)
def test_a_wrong_state_is_refused_in_one_line_and_changes_nothing(state: Any, message: str) -> None:
    made = make("rigl")
    train(made[0], made[1], range(4))
    before = copy.deepcopy((made[0].state_dict(), made[2].state_dict()))
    with pytest.raises(UserError) as error:
        made[2].load_state_dict(state())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    after = made[2].state_dict()
    assert all(torch.equal(tensor, made[0].state_dict()[name]) for name, tensor in before[0].items())
    assert_same_state(before[1], after)
    assert (after["steps"], after["updates"]) == (4, 1)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_memory_of_another_shape_is_refused(steps: int) -> None:
    made, state = make("snfs"), make("snfs")[2].state_dict()
    train(made[0], made[1], range(steps))
    size = state["memory"]["last.weight"].numel()
    state["memory"]["last.weight"] = torch.ones(1, size, 1)
    with pytest.raises(UserError, match=rf'SNFS for "last.weight" has the shape \(1, {size}, 1\) instead'):
        made[2].load_state_dict(state)


def pickled(objects: Any) -> Any:
    return pickle.loads(pickle.dumps(objects))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("algorithm", SPARSE)
def test_model_optimizer_and_topology_copied_together_go_on_alike(
    algorithm: str, order: tuple[int, ...], copied_by: Callable[[Any], Any]
) -> None:
    original = make(algorithm)
    train(original[0], original[1], range(4))
    copies = dict(zip(order, copied_by([original[i] for i in order]), strict=True))
    copied: Any = tuple(copies[i] for i in range(3))
    assert_same(original, copied)
    assert Topology.of(copied[0]) is copied[2]
    assert {id(layer.parameter) for layer in copied[2].layers} <= {id(p) for p in copied[0].parameters()}
    train(copied[0], copied[1], range(4, 10))
    assert_sparse(copied[2])
    assert original[2].steps == 4  # the original took no part
    train(original[0], original[1], range(4, 10))
    assert_same(original, copied)


@pytest.mark.parametrize("algorithm", ["rigl", "snfs"])
def test_a_pickled_packed_model_goes_on_alike_with_its_topology_and_average(algorithm: str) -> None:
    chosen = ALGORITHMS[algorithm](sparsity=0.7, every=3)
    model = pack(perceptron(), chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    topology = chosen.attach(model, optimizer, 40)
    original = model, optimizer, topology, EMA(model)
    train(model, optimizer, range(4))
    copied = pickled(original)
    for first, second, _, average in (original, copied):
        train(first, second, range(4, 10))
        average.update()
    assert_same_tensors(model, copied[0])
    assert copied[2].updates == topology.updates == 3
    for name, value in original[3].values.items():
        assert torch.equal(value, copied[3].values[name])


def test_a_shallow_copy_is_refused() -> None:
    with pytest.raises(UserError, match="two topologies cannot have the same weights"):
        copy.copy(make("set")[2])


@pytest.mark.parametrize("algorithm", ["static", "rigl", "snfs"])
def test_a_copy_of_the_model_alone_is_an_ordinary_model(algorithm: str) -> None:
    model, _, topology = make(algorithm)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_tensors(model, other)
        backward(other, 0)
        gradient = other.last.weight.grad
        assert gradient is not None
        assert torch.count_nonzero(gradient) == gradient.numel()
        ordinary = torch.optim.SGD(other.parameters(), lr=0.1)
        ordinary.step()
        assert torch.count_nonzero(other.last.weight) == other.last.weight.numel()
    assert topology.steps == 0
    assert_sparse(topology)


def test_an_average_of_torch_takes_the_model_as_it_is() -> None:
    model, optimizer, topology = make("static")
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, optimizer, range(3))
    average.update_parameters(model)
    for name, mask in topology.masks.items():
        assert torch.count_nonzero(average.module.get_parameter(name).detach()[~mask]) == 0


def test_a_detached_topology_stays_detached_when_copied() -> None:
    made = make("static")
    made[2].detach()
    model, optimizer, topology = copy.deepcopy(made)
    train(model, optimizer, range(2))
    assert topology.steps == 0
    assert torch.count_nonzero(model.first.weight) == model.first.weight.numel()


def test_two_topologies_share_a_model_in_turn() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = Static(sparsity=0.5).attach(model, optimizer)
    train(model, optimizer, range(2))
    first.detach()
    second = SET(sparsity=0.9, every=2, seed=1).attach(model, optimizer, total_steps=20)
    train(model, optimizer, range(2, 8))
    assert (first.steps, second.steps) == (2, 6)
    assert_sparse(second)


def test_a_topology_says_what_it_is() -> None:
    model = torch.nn.Linear(20, 50)
    topology = Static(sparsity=0.9).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(topology) == "<Static, masked: 100 of 1,000 weights active (10.00%), step 0, 0 updates>"
