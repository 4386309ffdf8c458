"""What each algorithm drops and grows, against oracles of a few lines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.topology import GMP, MEST, SET, SNFS, Dense, Dynamic, GraNet, RigL, Static, Topology
from topology_helpers import DYNAMIC, assert_sparse, backward, perceptron

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
LR, EVERY, STEPS = 0.1, 3, 30
ALWAYS: dict[str, Any] = {"sparsity": 0.7, "every": EVERY, "drop_fraction": 0.4, "distribution": "uniform"}


class Bench:
    """One 9x11 weight in float64 with hand-made gradients and plain SGD, so that numpy can follow every step."""

    def __init__(self, algorithm: Dynamic) -> None:
        self.algorithm = algorithm
        torch.manual_seed(0)
        self.weight = nn.Linear(11, 9, bias=False).double()
        optimizer = torch.optim.SGD(self.weight.parameters(), lr=LR)
        self.topology = algorithm.attach(self.weight, optimizer, total_steps=STEPS)
        self.optimizer = optimizer
        self.random = np.random.default_rng(7)

    def values(self) -> Array:
        return self.weight.weight.detach().numpy().flatten().copy()

    def mask(self) -> Mask:
        return self.topology.masks["weight"].numpy().flatten().copy()

    def step(self) -> tuple[Array, Array, Mask, Mask]:
        """The gradient, the weights an update looks at, and the mask before and after one optimizer step."""
        gradient = self.random.normal(size=99)
        before, weights = self.mask(), self.values()
        skipped = self.topology.update_is_next and self.algorithm.step_at_update == "skip"
        self.optimizer.zero_grad()
        (self.weight.weight * torch.tensor(gradient).view(9, 11)).sum().backward()
        self.optimizer.step()
        return gradient, weights if skipped else weights - LR * gradient * before, before, self.mask()


def lowest(score: Array, among: Mask, count: int) -> Mask:
    chosen = np.zeros(len(score), bool)
    chosen[sorted(np.flatnonzero(among), key=lambda i: score[i])[:count]] = True
    return chosen


def oracle_swap(algorithm: Dynamic, step: int, count: int) -> int:
    """How many of `count` weights an update exchanges: cosine, linear or constant over the window."""
    progress = step / round(algorithm.until * STEPS)
    start, end = algorithm.drop_fraction, algorithm.drop_end
    share = {
        "cosine": end + 0.5 * (start - end) * (1 + np.cos(np.pi * progress)),
        "linear": start + (end - start) * progress,
        "constant": start,
    }[algorithm.drop_decay]
    return round(share * count)


def check_updates(
    algorithm: Dynamic, drop_score: Callable[[Array, Array], Array], grow: Callable[[Bench, Array], Array] | None
) -> int:
    """Follow a run: at updates the dropped set is the oracle's, and the grown one too where growth is not random."""
    bench, updates = Bench(algorithm), 0
    for step in range(1, STEPS + 1):
        gradient, weights, before, after = bench.step()
        score = None if grow is None else grow(bench, gradient)
        if step % EVERY or not 0 < step < round(algorithm.until * STEPS):
            assert (before == after).all()
            continue
        count = oracle_swap(algorithm, step, int(before.sum()))
        dropped = lowest(drop_score(weights, gradient * before), before, count)
        candidates = ~before | dropped if algorithm.regrow else ~before
        grown = after & (dropped | ~before)
        assert (after[before & ~dropped]).all()
        assert grown.sum() == count
        assert not grown[~candidates].any()
        if score is not None:
            assert (grown == lowest(-score, candidates, count)).all()
        assert (bench.values()[grown] == 0).all()
        updates += 1
    return updates


def magnitude(weights: Array, gradient: Array) -> Array:
    return np.abs(weights)


@pytest.mark.parametrize("regrow", [True, False])
@pytest.mark.parametrize("step_at_update", ["take", "skip"])
@pytest.mark.parametrize("drop_decay", ["cosine", "linear", "constant"])
def test_rigl_drops_by_magnitude_and_grows_by_gradient(regrow: bool, step_at_update: Any, drop_decay: Any) -> None:
    options = {"regrow": regrow, "step_at_update": step_at_update, "drop_decay": drop_decay, "drop_end": 0.1}
    updates = check_updates(RigL(**ALWAYS, **options), magnitude, lambda bench, gradient: np.abs(gradient))
    assert updates == 7  # 3, 6, ..., 21 of 30 steps: until 75 %


@pytest.mark.parametrize("regrow", [True, False])
def test_set_drops_by_magnitude_and_grows_at_random(regrow: bool) -> None:
    assert check_updates(SET(**ALWAYS, regrow=regrow), magnitude, None) == 9


@pytest.mark.parametrize("gradient_weight", [0.0, 1.0, 5.0])
def test_mest_drops_by_weight_and_gradient(gradient_weight: float) -> None:
    def importance(weights: Array, gradient: Array) -> Array:
        return np.abs(weights) + gradient_weight * np.abs(gradient)

    assert check_updates(MEST(**ALWAYS, gradient_weight=gradient_weight), importance, None) == 9


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_snfs_grows_by_its_own_momentum(momentum: float) -> None:
    smoothed = np.zeros(99)

    def grow(bench: Bench, gradient: Array) -> Array:
        smoothed[:] = momentum * smoothed + (1 - momentum) * gradient  # of all indices, active or not
        return np.abs(smoothed)

    assert check_updates(SNFS(**ALWAYS, momentum=momentum), magnitude, grow) == 9


def test_signed_set_drops_its_share_on_both_sides_of_zero() -> None:
    bench, checked = Bench(SET(**ALWAYS, criterion="signed")), 0
    for step in range(1, STEPS + 1):
        _, weights, before, after = bench.step()
        if step % EVERY or step == STEPS:
            continue
        count = round(0.4 * before.sum())
        negative = before & (weights < 0)
        from_positive = round(count * int((before & ~negative).sum()) / int(before.sum()))
        dropped = lowest(weights, before & ~negative, from_positive) | lowest(
            -weights, negative, count - from_positive
        )
        assert after[before & ~dropped].all()
        assert after.sum() == before.sum()
        assert (bench.values()[dropped] == 0).all()
        checked += 1
    assert checked == 9


@pytest.mark.parametrize("sign", [1, -1])
def test_signed_set_takes_all_from_one_side_where_the_other_is_empty(sign: int) -> None:
    bench = Bench(SET(sparsity=0.7, every=1, criterion="signed", distribution="uniform", drop_fraction=0.5))
    before = bench.mask()
    with torch.no_grad():
        bench.weight.weight.abs_().mul_(sign)
    dropped = lowest(np.abs(bench.values()), before, round(0.5 * before.sum()))
    bench.weight.weight.grad = torch.zeros(9, 11, dtype=torch.float64)
    bench.optimizer.step()
    assert bench.mask()[before & ~dropped].all()
    assert bench.mask().sum() == before.sum()


@pytest.mark.parametrize("regrow", [True, False])
def test_random_growth_is_uniform_over_the_candidates(regrow: bool) -> None:
    """From one fixed mask under 600 seeds: exactly as many as dropped, and no place is preferred."""
    options = {**ALWAYS, "every": 1, "regrow": regrow}
    bench, grown_at = Bench(SET(**options)), np.zeros(99)
    start, before, values = (
        copy.deepcopy(bench.topology.state_dict()),
        bench.mask(),
        bench.weight.weight.detach().clone(),
    )
    count = round(0.4 * before.sum())
    dropped = lowest(np.abs(bench.values()), before, count)
    candidates = ~before | dropped if regrow else ~before
    for seed in range(600):
        bench.topology.algorithm = SET(**options, seed=seed)
        bench.topology.load_state_dict(start)
        bench.weight.weight.data.copy_(values)
        bench.weight.weight.grad = torch.zeros(9, 11, dtype=torch.float64)
        bench.optimizer.step()
        grown = bench.mask() & candidates
        assert grown.sum() == count
        grown_at += grown
    observed = grown_at[candidates]
    assert observed.sum() == grown_at.sum()
    chi_square = ((observed - observed.mean()) ** 2 / observed.mean()).sum()
    freedom = len(observed) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_seeds_decide_masks_and_growth_and_nothing_else_does() -> None:
    def masks(seed: int, global_seed: int) -> Mask:
        torch.manual_seed(global_seed)
        bench = Bench(SET(**ALWAYS, seed=seed))
        for _ in range(10):
            torch.rand(global_seed)  # somebody else uses torch's own generator
            bench.step()
        return bench.mask()

    assert (masks(1, 3) == masks(1, 4)).all()
    assert (masks(1, 3) != masks(2, 3)).any()


@pytest.mark.parametrize("options", [{"initial_sparsity": 0.0}, {"initial_sparsity": 0.4, "begin": 0.2}])
def test_gmp_follows_the_cubic_and_ends_exactly(options: dict[str, Any]) -> None:
    bench = Bench(GMP(sparsity=0.83, every=4, until=0.8, distribution="uniform", **options))
    initial, final = round(99 * (1 - options["initial_sparsity"])), round(99 * (1 - 0.83))
    begin = round(options.get("begin", 0) * STEPS)
    updates = [step for step in range(begin + 1, 24) if step % 4 == 0]
    for step in range(1, STEPS + 1):
        _, weights, before, after = bench.step()
        if step in updates:
            left = (1 - (step - begin) / (updates[-1] - begin)) ** 3
            target = final + round(left * (initial - final))
            assert after.sum() == target
            assert (after == before & ~lowest(np.abs(weights), before, int(before.sum()) - target)).all()
        else:
            assert (after == before).all()
    assert bench.mask().sum() == bench.topology.active == final


def test_gmp_never_has_to_grow_a_layer() -> None:
    """By largest remainders the third layer gets 5 of 33 active weights and 6 of 32 (the Alabama paradox)."""
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False), nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    algorithm = GMP(initial_sparsity=3 / 36, sparsity=4 / 36, distribution="uniform", every=1)
    topology = algorithm.attach(model, optimizer, total_steps=8)
    assert [layer.initial for layer in topology.layers] == [14, 14, 6]
    for _ in range(8):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert [layer.active for layer in topology.layers] == [13, 13, 6]
    assert_sparse(topology)


def test_granet_prunes_along_the_cubic_and_regrows_by_gradient() -> None:
    algorithm = GraNet(sparsity=0.9, every=3, until=0.8, distribution="uniform")
    bench, initial, final = Bench(algorithm), round(99 * 0.5), round(99 * 0.1)
    for step in range(1, STEPS + 1):
        gradient, weights, before, after = bench.step()
        if step % 3 or step >= 24:
            assert (after == before).all()
            continue
        target = final + round((1 - step / 21) ** 3 * (initial - final))
        swap = oracle_swap(algorithm, step, target)
        dropped = lowest(np.abs(weights), before, int(before.sum()) - target + swap)
        grown = lowest(-np.abs(gradient), ~before | dropped, swap)
        assert (after == (before & ~dropped | grown)).all()
    assert bench.topology.active == final


def test_static_and_dense_never_change() -> None:
    for algorithm, active in ((Static(sparsity=0.7, distribution="uniform"), 30), (Dense(), 0)):
        model = nn.Linear(11, 9, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        topology = algorithm.attach(model, optimizer)
        masks = topology.masks
        for _ in range(5):
            model(torch.ones(1, 11)).sum().backward()
            optimizer.step()
        assert topology.active == active
        assert masks.keys() == topology.masks.keys()
        assert all(torch.equal(masks[name], topology.masks[name]) for name in masks)
        assert topology.updates == 0


def test_a_dense_layer_is_never_exchanged() -> None:
    """Dropping from a dense layer could only grow the same weights back, at zero."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    SET(every=1, distribution=[1.0, 0.5]).attach(model, optimizer, total_steps=10)
    kept = [weight.detach().clone() for weight in model.parameters()]
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    same = [torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True)]
    assert same == [True, False]


# One pass on the device: nothing is read back, nothing is sorted in full


class OnDevice(TorchDispatchMode):
    """Counts operations and fails on those that make the host wait for a GPU or sort a whole layer."""

    waits = ("_local_scalar_dense", "nonzero", "sort", "is_nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.topk = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        boolean_index = name.startswith("index") and any(
            index is not None and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else [])
        )
        assert name not in self.waits, f"{name} makes the host wait or sorts in full"
        assert not boolean_index, "an index by mask makes the host wait"
        self.topk += name == "topk"
        return func(*args, **(kwargs or {}))


def updating(algorithm: Dynamic) -> tuple[nn.Module, torch.optim.Optimizer, Topology]:
    """A perceptron whose next optimizer step is an update."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    topology = algorithm.attach(model, optimizer, total_steps=100)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    optimizer.zero_grad()
    assert topology.update_is_next
    return model, optimizer, topology


@pytest.mark.parametrize("name", [*DYNAMIC, "signed"])
def test_an_update_never_makes_the_host_wait_and_never_sorts(name: str) -> None:
    """rigl-torch sorts each layer twice and masks all layers anew inside its loop over layers."""
    options: dict[str, Any] = {"every": 4, "step_at_update": "take"}
    algorithm = SET(**options, criterion="signed") if name == "signed" else DYNAMIC[name](**options)
    model, optimizer, topology = updating(algorithm)
    before = topology.masks
    backward(model, 3)
    with OnDevice() as device:
        optimizer.step()
    assert topology.updates == 1
    assert any(not torch.equal(before[layer.name], layer.mask()) for layer in topology.layers)
    assert_sparse(topology)
    passes = {"gmp": 1, "signed": 3}.get(name, 2)  # to drop (on both sides of zero), to grow
    assert device.topk == passes * len(topology.layers)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*DYNAMIC, "signed"])
def test_an_update_never_waits_for_the_gpu(name: str) -> None:
    algorithm = SET(every=1, criterion="signed") if name == "signed" else DYNAMIC[name](every=1)
    model = perceptron().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    topology = algorithm.attach(model, optimizer, total_steps=100)
    for step in range(4):
        inputs = torch.randn(16, 12, device="cuda")
        model(inputs).square().mean().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert topology.updates == 4
    assert_sparse(topology)


def test_a_weight_that_took_no_part_in_the_loss_is_grown_at_random() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 6, bias=False), "unused": nn.Linear(6, 6, bias=False)})
    for kind in (RigL, SNFS, GraNet):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        topology = kind(every=1, sparsity=0.5, until=1.0).attach(model, optimizer, total_steps=10)
        seen: list[Tensor] = []
        for _ in range(5):
            optimizer.zero_grad()
            model["used"](torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            seen.append(topology.masks["unused.weight"])
        assert_sparse(topology)
        assert len({tuple(mask.flatten().tolist()) for mask in seen}) > 1
        topology.detach()
