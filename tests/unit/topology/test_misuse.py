"""What a user may do wrong with a topology is said in one line, or simply works."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.analysis.gradient_statistics import active_vector_of
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.sparse import pack
from equipoise.topology import GMP, MEST, SET, SNFS, Algorithm, BSRNet, GraNet, RigL, Static, Topology
from equipoise.topology.selection import select
from topology_helpers import SPARSE, Made, assert_sparse, attach, batch, make, perceptron, train


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# No weight at all


@pytest.mark.parametrize(
    "algorithm", [SET(sparsity=0.999), GMP(sparsity=0.999, every=2), Static(distribution=[0, 0])]
)
def test_a_model_without_an_active_weight_is_refused(algorithm: Algorithm) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    before = copy.deepcopy(model.state_dict())
    for refused in (lambda: algorithm.attach(model, sgd(model), 20), lambda: pack(model, algorithm)):
        with pytest.raises(UserError, match="none of the 18 chosen weights would be active") as error:
            refused()
        one_line(error)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert Static(sparsity=0.95).attach(model, sgd(model)).active == 1  # one is enough, whatever layer it is in


# Attaching twice


@pytest.mark.parametrize("packed", [False, True])
def test_a_second_topology_is_refused_and_changes_nothing(packed: bool) -> None:
    first = SET(sparsity=0.9, every=2)
    model: nn.Module = pack(perceptron(), first) if packed else perceptron()
    optimizer = sgd(model)
    topology = first.attach(model, optimizer, 20)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UserError, match=r"already belongs to a SET topology; call Topology\.of\(model\)\.detach\(\)"
    ) as error:
        SET(sparsity=0.9, every=2, seed=1).attach(model, optimizer, 20)
    one_line(error)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert Topology.of(model) is topology
    train(model, optimizer, range(3))
    assert topology.steps == 3


def test_two_topologies_share_a_model_that_neither_has_whole() -> None:
    model = perceptron()
    optimizer = sgd(model)
    parts = [Static(sparsity=0.5, exclude="last"), Static(sparsity=0.9, exclude="first")]
    topologies = [algorithm.attach(model, optimizer) for algorithm in parts]
    train(model, optimizer, range(2))
    assert [list(topology.masks) for topology in topologies] == [["first.weight"], ["last.weight"]]
    for topology in topologies:
        assert_sparse(topology)


def test_what_follows_one_topology_refuses_two() -> None:
    """Muon for the matrices and AdamW for the rest is the usual reason."""
    model = perceptron()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.last)]
    first = Static(sparsity=0.5, exclude="last").attach(model, optimizers[0])
    eq.EMA(model).update()
    eq.SVRG().attach(model)
    early = eq.EMA(model)
    second = Static(sparsity=0.9, exclude="first").attach(model, optimizers[1])
    for refused in (
        early.update,
        lambda: eq.EMA(model, topology=first),
        lambda: eq.SVRG().attach(model),
        lambda: eq.SVRG().attach(model, first),
        lambda: active_vector_of(model),
    ):
        with pytest.raises(UserError, match=r'^"last\.weight" belongs to another topology of the model') as error:
            refused()
        one_line(error)
    with pytest.raises(UserError, match=r'^"first\.weight" belongs to another topology'):
        eq.SVRG().attach(model, second)
    second.detach()
    assert eq.SVRG().attach(model).topology is first


# Parameters that are added later


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.extra = nn.Sequential()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.extra(self.body(inputs))


@pytest.mark.parametrize("algorithm", SPARSE)
def test_parameters_may_be_added_after_attaching(algorithm: str) -> None:
    model = Growing()
    optimizer = sgd(model)
    topology = attach(algorithm, model, optimizer, 20, sparsity=0.7)
    train(model, optimizer, range(2))
    model.extra.append(nn.Linear(5, 5))
    optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 0.01})
    before = copy.deepcopy(model.extra.state_dict())
    train(model, optimizer, range(2, 8))
    assert topology.steps == 8
    assert_sparse(topology)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.extra.state_dict().items())


@pytest.mark.parametrize("estimator", [eq.SVRG(), eq.MVR()])
def test_averages_and_corrections_name_a_parameter_that_was_added(estimator: Any) -> None:
    model = Growing()
    optimizer = sgd(model)
    topology = SET(sparsity=0.7, every=3).attach(model, optimizer, 20)
    correction, average = estimator.attach(model, topology), eq.EMA(model)
    batches = [batch(step) for step in range(3)]

    def loss_fn(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), labels)

    correction.refresh(batches, loss_fn)
    correction.backward(loss_fn, *batches[0])
    optimizer.step()
    model.extra.append(nn.Linear(5, 5))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r'^"extra\.0\.bias" was added .* attach a new correction$') as error:
        correction.backward(loss_fn, *batches[1])
    one_line(error)
    with (
        pytest.raises(UserError, match=r'^"extra\.0\.bias" was added .* create a new average$') as error,
        average.applied(),
    ):
        pass
    one_line(error)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    correction = estimator.attach(model, topology)
    correction.refresh(batches, loss_fn)
    correction.backward(loss_fn, *batches[1])
    correction.backward(loss_fn, *batches[2])
    with eq.EMA(model).applied():
        model(batches[0][0])


# What is free again


def test_copies_and_what_is_free_again_can_be_attached() -> None:
    model, _, topology = make("set")
    twin = copy.deepcopy(model)  # the model alone: nothing is attached to it
    SET(sparsity=0.7, every=3).attach(twin, sgd(twin), 40)
    whole = copy.deepcopy((model, topology.optimizer, topology))
    with pytest.raises(UserError, match="already belongs to"):  # this one came with its topology
        SET(every=3).attach(whole[0], whole[1], 40)
    whole[2].detach()
    SET(every=3).attach(whole[0], whole[1], 40)
    topology.detach()
    SET(every=3).attach(model, topology.optimizer, 40)


def test_a_packed_model_whose_topology_is_gone_can_be_attached() -> None:
    algorithm = Static(sparsity=0.9)
    model = pack(nn.Sequential(nn.Linear(12, 8)), Static(sparsity=0.9))
    algorithm.attach(model, sgd(model))
    gc.collect()
    assert Topology.of(model) is None
    algorithm.attach(model, sgd(model))


# Another algorithm than the model was packed for

ALGORITHMS: list[Algorithm] = [
    SET(sparsity=0.9, every=3),
    RigL(sparsity=0.9, every=3, distribution="uniform"),
    MEST(sparsity=0.9, every=3, distribution="er", exclude=("0.weight",)),
    SNFS(sparsity=0.9, every=3, dense_last=True),
    GMP(sparsity=0.9, every=3),
    GraNet(sparsity=0.9, every=3),
    BSRNet(sparsity=0.9, distribution="uniform"),
    Static(sparsity=0.9, distribution={"0.*": 0.5, "*": 0.1}),
    Static(sparsity=0.9, distribution=(0.5, 0.2, 0.1)),
]


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_the_same_algorithm_is_attached_to_what_it_packed(algorithm: Algorithm) -> None:
    model = pack(three_layers(), algorithm)
    finals = {layer.name: layer.final for layer in algorithm.attach(model, sgd(model), 30).layers}
    masked = three_layers()
    topology = algorithm.attach(masked, sgd(masked), 30)
    assert finals == {layer.name: layer.final for layer in topology.layers}
    again = pack(masked, topology)
    if not isinstance(algorithm, BSRNet):  # which needs the signs of the dense weights
        assert algorithm.attach(again, sgd(again), 30).active == topology.active


@pytest.mark.parametrize("model", ["vgg16", "resnet18"])
def test_bsr_densities_of_a_packed_model(model: str) -> None:
    """The table is that of the dense model; the packed one keeps the counts."""
    algorithm = BSRNet(sparsity=0.99)
    packed = pack(MODELS[model](classes=10), algorithm)
    topology = algorithm.attach(packed, sgd(packed), 30)
    assert sum(layer.final for layer in topology.layers) == round(0.01 * topology.size)


@pytest.mark.parametrize(
    ("other", "densities"),
    [
        (RigL(sparsity=0.5, every=3), ("0.01", "0.5")),
        (SET(sparsity=0.98, every=3), ("0.01", "0.02")),
        (RigL(sparsity=0.99, every=3, distribution="uniform"), ("0.01", "0.01")),
    ],
)
def test_an_algorithm_of_another_density_is_refused(other: Algorithm, densities: tuple[str, str]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 50))
    model = pack(net, RigL(sparsity=0.99, every=3))
    with pytest.raises(UserError, match="packed for a density of") as error:
        other.attach(model, sgd(model), 30)
    told = one_line(error)
    assert f"density of {densities[0]}, {type(other).__name__} needs {densities[1]} (" in told


# Loading


@pytest.mark.parametrize("algorithm", ["static", "set", "rigl", "snfs", "mest"])
def test_a_state_of_another_sparsity_is_refused_and_changes_nothing(algorithm: str) -> None:
    denser, sparser = (make(algorithm, sparsity=s)[2] for s in (0.5, 0.9))
    masks = denser.masks
    with pytest.raises(UserError, match="attach with the sparsity and distribution") as error:
        denser.load_state_dict(sparser.state_dict())
    there, here = (topology.layers[0].active for topology in (sparser, denser))
    assert f'{there} active weights in "first.weight", this topology {here}:' in one_line(error)
    assert all(torch.equal(mask, masks[name]) for name, mask in denser.masks.items())


@pytest.mark.parametrize("algorithm", ["gmp", "granet", "bsr-net"])
def test_counts_that_change_on_the_way_are_loaded(algorithm: str) -> None:
    trained, fresh = make(algorithm), make(algorithm)
    train(trained[0], trained[1], range(13))
    fresh[0].load_state_dict(trained[0].state_dict())
    fresh[2].load_state_dict(trained[2].state_dict())
    assert fresh[2].active == trained[2].active


def resumed(order: str, state: dict[str, Any], algorithm: str) -> Made:
    """a: attach, m: load the model, t: load the topology."""
    model = perceptron(seed=5)
    optimizer = sgd(model)
    topology: Topology | None = None
    for action in order:
        if action == "a":
            topology = attach(algorithm, model, optimizer, 40, sparsity=0.7)
        elif action == "m":
            model.load_state_dict(state["model"])
        else:
            assert topology is not None
            topology.load_state_dict(state["topology"])
    assert topology is not None
    return model, optimizer, topology


@pytest.mark.parametrize("algorithm", ["set", "rigl", "snfs", "granet", "bsr-net"])
@pytest.mark.parametrize("steps", [0, 3, 10])
@pytest.mark.parametrize("order", ["amt", "atm", "mamt", "mat"])
def test_resuming_never_loses_weights(algorithm: str, steps: int, order: str) -> None:
    """Attach, load the model, load the topology: in any order, and with a model that was loaded before attaching."""
    model, optimizer, topology = make(algorithm)
    train(model, optimizer, range(steps))
    state = copy.deepcopy({"model": model.state_dict(), "topology": topology.state_dict()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resumed(order, state, algorithm)
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in found[0].state_dict().items())
    train(found[0], found[1], range(2))


# Selectors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)


def test_a_type_means_every_weight_inside_a_module_of_it() -> None:
    inside = ["attention.in_proj_weight", "attention.out_proj.weight"]
    others = ["mlp.0.weight", "mlp.1.weight", "head.weight"]
    assert list(select(Block(), exclude=(nn.MultiheadAttention,))) == others
    assert list(select(Block(), include=(nn.MultiheadAttention,))) == inside
    assert list(select(Block(), exclude=(nn.Sequential,))) == [*inside, "head.weight"]
    assert list(select(Block(), include=(nn.Sequential, "head"))) == others
    assert list(select(Block(), include=(nn.Sequential,), exclude=("mlp.1",))) == ["mlp.0.weight"]
    assert list(select(Block().attention, include=(nn.MultiheadAttention,))) == ["in_proj_weight", "out_proj.weight"]


def test_by_default_the_type_of_the_owner_alone_counts() -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.inner = nn.Bilinear(4, 4, 3)

    assert list(select(nn.Sequential(Odd()))) == ["0.weight"]


@pytest.mark.parametrize("bare", ["mlp.0.weight", "mlp.*", nn.MultiheadAttention])
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_one_selector_may_be_given_bare(option: str, bare: Any) -> None:
    single, tupled = ({option: value} for value in (bare, (bare,)))
    assert list(select(Block(), **single)) == list(select(Block(), **tupled))
    assert SET(**single) == SET(**tupled)
    assert getattr(SET(**single), option) == (bare,)


# Schedules and numbers


@pytest.mark.parametrize("algorithm", [SET, RigL, SNFS, MEST])
def test_a_schedule_without_an_update_is_told_once(algorithm: Callable[..., Algorithm]) -> None:
    model = perceptron()
    with pytest.warns(UserWarning, match="every=100: no update falls inside .* total_steps=90") as caught:
        algorithm(every=100).attach(model, sgd(model), 90)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("every", "total", "options"), [(100, 200, {}), (3, 5, {}), (1, 5, {"begin": 0.2})])
def test_a_schedule_with_an_update_is_not_warned_of(every: int, total: int, options: dict[str, float]) -> None:
    model = perceptron()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology = RigL(every=every, **options).attach(model, optimizer, total)
    train(model, optimizer, range(total))
    assert topology.updates > 0


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(RigL, "sparsity", "0.9"), (SET, "every", "100"), (SNFS, "momentum", None), (MEST, "drop_fraction", "0.3")],
)
def test_a_number_that_is_none_is_refused(kind: Callable[..., Algorithm], name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name}={value!r}: expected a number$"):
        kind(**{name: value})


def test_all_algorithms_are_at_the_top() -> None:
    from equipoise.topology import ALGORITHMS as catalogue

    for kind in catalogue.values():
        assert getattr(eq, kind.__name__) is kind
        assert kind.__name__ in eq.__all__


# Rprop


@pytest.mark.parametrize("packed", [False, True])
def test_what_grows_under_rprop_takes_a_first_step_of_the_learning_rate(packed: bool) -> None:
    algorithm = SET(sparsity=0.7, every=3)
    model: nn.Module = pack(perceptron(), algorithm) if packed else perceptron()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    topology = algorithm.attach(model, optimizer, 40)
    train(model, optimizer, range(2))
    before = topology.masks
    train(model, optimizer, range(2, 3))
    grown = {name: mask & ~before[name] for name, mask in topology.masks.items()}
    train(model, optimizer, range(3, 4))
    assert topology.updates == 1
    for layer in topology.layers:
        moved = layer.weight.view(grown[layer.name].shape)[grown[layer.name]].abs()
        assert len(moved) > 0
        torch.testing.assert_close(
            moved, torch.full_like(moved, 0.01)
        )  # its gradient is new: neither faster nor slower
