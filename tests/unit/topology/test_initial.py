"""The initial mask: random for dense weights, the nonzeros first for weights that already have zeros."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import equipoise as eq
from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.topology import ALGORITHMS, Algorithm, Static
from topology_helpers import SPARSE

SIZE, BUDGET = 60 * 40, 240  # one layer at 90 %


def layer(nonzeros: int, seed: int = 0) -> nn.Sequential:
    """A linear layer with random nonzeros at random indices."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 60))
    weight = torch.randn(SIZE, generator=generator)
    weight[torch.randperm(SIZE, generator=generator)[nonzeros:]] = 0
    with torch.no_grad():
        model[0].weight.copy_(weight.view(60, 40))
    return model


def masked(model: nn.Module, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    topology = algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1000)
    found = topology.layers[0]
    return found.weight.clone(), found.mask().reshape(-1)


def packed(model: nn.Module, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    return masked(eq.sparse.pack(model, algorithm), algorithm)


STORAGES: dict[str, Callable[[nn.Module, Algorithm], tuple[Tensor, Tensor]]] = {"masked": masked, "packed": packed}


def random_order(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(derive(seed, "mask", "0.weight"))
    return torch.randperm(SIZE, generator=generator).numpy()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("nonzeros", [0, 100, 240])
def test_nonzeros_are_kept_and_random_weights_are_added(storage: str, nonzeros: int) -> None:
    model = layer(nonzeros)
    before = model[0].weight.detach().clone().reshape(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight, mask = STORAGES[storage](model, Static(sparsity=0.9))
    assert torch.equal(weight, before)
    kept = set(np.flatnonzero(before.numpy()))
    added = [i for i in random_order() if i not in kept][: BUDGET - nonzeros]
    assert set(np.flatnonzero(mask.numpy())) == kept | set(added)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_largest_are_kept_if_there_are_too_many_and_a_line_says_so(storage: str) -> None:
    model = layer(1000)
    before = model[0].weight.detach().clone().reshape(-1).numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight, mask = STORAGES[storage](model, Static(sparsity=0.9))
    largest = np.sort(np.argsort(-np.abs(before))[:BUDGET])
    assert np.array_equal(np.flatnonzero(mask.numpy()), largest)
    assert np.array_equal(weight.numpy()[largest], before[largest])
    assert np.count_nonzero(weight.numpy()) == BUDGET
    assert [str(w.message) for w in caught] == [
        '"0.weight" had 1,000 nonzero weights, more than sparsity=0.9 allows: the smallest 760 are set to zero; '
        'distribution="nonzeros" keeps all of them'
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("nonzeros", [100, 240, 1000])
def test_a_random_mask_by_name(storage: str, nonzeros: int) -> None:
    model = layer(nonzeros)
    before = model[0].weight.detach().clone().reshape(-1)
    weight, mask = STORAGES[storage](model, Static(sparsity=0.9, initial_mask="random"))
    assert set(np.flatnonzero(mask.numpy())) == set(random_order()[:BUDGET])
    assert torch.equal(weight, before * mask)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("seed", [0, 3])
def test_a_dense_weight_gets_a_random_mask(storage: str, seed: int) -> None:
    _, mask = STORAGES[storage](layer(SIZE), Static(sparsity=0.9, seed=seed))
    assert set(np.flatnonzero(mask.numpy())) == set(random_order(seed)[:BUDGET])


def test_zeros_by_chance_do_not_make_a_weight_sparse() -> None:
    """1 of 40,000 float32 weights; 1 of 200 in bf16, whose uniform numbers have 8 bits."""
    for dtype, zeros in ((torch.float32, 4), (torch.bfloat16, 200)):
        model = nn.Sequential(nn.Linear(200, 200)).to(dtype)
        random = Static(sparsity=0.9, initial_mask="random").attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        expected = random.masks["0.weight"]
        random.detach()
        with torch.no_grad():
            model[0].weight.fill_(1).view(-1)[:zeros] = 0
        found = Static(sparsity=0.9).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert torch.equal(found.masks["0.weight"], expected)


@pytest.mark.parametrize("name", SPARSE)
def test_attaching_to_a_sparse_model_loses_no_weight(name: str) -> None:
    """A run that is resumed by a framework loads the weights before it attaches."""
    algorithm = ALGORITHMS[name](sparsity=0.8, **({"distribution": "erk"} if name == "bsr-net" else {}))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 10))
    first = algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1000)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    masks = first.masks
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 10))
    other.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = algorithm.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), total_steps=1000)
    for key, value in other.state_dict().items():
        assert torch.equal(value, state[key])
    assert all(torch.equal(mask, masks[key]) for key, mask in second.masks.items())


@pytest.mark.parametrize("pattern", ["", "2:4"])
def test_the_largest_weights_of_a_dense_model(pattern: str) -> None:
    model = nn.Linear(8, 6)
    weight = model.weight.detach().clone().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm = Static(sparsity=0.5, initial_mask="largest", pattern=pattern)
        topology = algorithm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    groups = np.abs(weight).reshape(-1, 4 if pattern else weight.size)
    expected = groups >= np.median(groups, axis=1, keepdims=True)
    np.testing.assert_array_equal(topology.masks["weight"].numpy(), expected.reshape(weight.shape))


@pytest.mark.parametrize("storage", STORAGES)
def test_fine_tuning_a_pruned_model(storage: str) -> None:
    """`from_nonzeros` has the counts of the model, and its zeros stay zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 10))
    for module, amount in zip(model[::2], (0.95, 0.5, 0), strict=True):
        if amount:
            prune.l1_unstructured(module, "weight", amount)
            prune.remove(module, "weight")
    with torch.no_grad():
        model[2].weight.view(-1)[7] = 1e-30  # tiny, and not zero
    before = {f"{i}.weight": model[i].weight.detach().clone() for i in (0, 2, 4)}
    algorithm = Static.from_nonzeros()
    if storage == "packed":
        model = eq.sparse.pack(model, algorithm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    topology = algorithm.attach(model, optimizer)
    assert topology.storage == storage
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 30)), torch.randint(10, (16,))).backward()
        optimizer.step()
    for each in topology.layers:
        old, new = before[each.name], each.weight.view(before[each.name].shape)
        assert each.active == np.count_nonzero(old.numpy())
        assert torch.equal(new != 0, old != 0)
        assert not torch.equal(new, old)


def test_a_model_packed_by_its_own_masks_is_fine_tuned() -> None:
    model = layer(500)
    model = eq.sparse.pack(model, {"0.weight": model[0].weight != 0})
    topology = Static.from_nonzeros().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (topology.active, topology.layers[0].final) == (500, 500)


def test_one_zero_is_kept_too() -> None:
    """A budget that is exactly the nonzeros means them, even of a weight with zeros by chance."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    with torch.no_grad():
        model[0].weight.view(-1)[77] = 0
        model[1].weight.view(-1)[::2] = 0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    topology = Static.from_nonzeros().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert topology.active == 300 * 300 - 1 + 300
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_wrong_use_is_one_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match='"nonzeros": none of the chosen weights is zero; load the pruned weights'):
        Static.from_nonzeros().attach(model, optimizer)
    with pytest.raises(UserError, match='initial_mask="dense": expected "nonzeros", "random" or "largest"'):
        Static(initial_mask="dense")  # type: ignore[arg-type]
