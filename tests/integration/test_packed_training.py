"""Training in packed storage, judged by the same training in masked storage and by dense torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.correction import CORRECTIONS, Agent
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.sparse import pack, unpack
from equipoise.storage.bitmap import get_bits, pack_bits, set_bits
from equipoise.storage.packed import PackedWeight
from equipoise.storage.packed_modules import PackedLayer
from equipoise.topology import GMP, MEST, SET, SNFS, Algorithm, BSRNet, GraNet, RigL, Static, Topology
from equipoise.training import RunFolder, Trainer, apply_overrides, make_recipe, read_recipe
from equipoise.training.trainer import resume

STEPS = 9
ALGORITHMS: dict[str, Algorithm] = {
    "static": Static(sparsity=0.9),
    "set": SET(sparsity=0.9, every=3),
    "rigl": RigL(sparsity=0.9, every=3),
    "rigl-itop": RigL.itop(sparsity=0.9, every=3),
    "snfs": SNFS(sparsity=0.9, every=3),
    "mest": MEST(sparsity=0.9, every=3),
    "gmp": GMP(sparsity=0.9, every=3),
    "granet": GraNet(sparsity=0.9, every=3),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["small"](classes=10, channels=1, size=8)


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator))
        for _ in range(count)
    ]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def smooth() -> nn.Module:
    """Without a kink, at which a difference of rounding would become one of a thousandth."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    layers = [first, nn.BatchNorm2d(16), nn.Tanh(), second, nn.BatchNorm2d(32), nn.Tanh()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def start(
    algorithm: Algorithm, packed: bool, make: Any = sgd, net: Any = small
) -> tuple[nn.Module, torch.optim.Optimizer, Topology]:
    model = pack(net(), algorithm) if packed else net()
    optimizer = make(model)
    return model, optimizer, algorithm.attach(model, optimizer, STEPS)


def weights_of(model: nn.Module, topology: Topology) -> dict[str, Tensor]:
    return unpack(model)[0] if topology.storage == "packed" else model.state_dict()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_storages_train_the_same_network(name: str, optimizer: Any) -> None:
    trained = []
    for packed in (False, True):
        model, stepper, topology = start(ALGORITHMS[name], packed, optimizer)
        for x, y in batches():
            loss = loss_fn(model, x, y)  # stays alive over the step, with the lengths of then in its graph
            loss.backward()
            stepper.step()
            stepper.zero_grad()
        trained.append((weights_of(model, topology), topology))
    (masked, one), (vectors, other) = trained
    assert (one.storage, other.storage) == ("masked", "packed")
    assert other.updates == (0 if name == "static" else 2)
    assert (one.active, one.exploration) == (other.active, other.exploration)
    for layer, mask in one.masks.items():
        torch.testing.assert_close(other.masks[layer], mask)
    assert set(masked) == set(vectors)
    for key, tensor in masked.items():
        torch.testing.assert_close(vectors[key], tensor, rtol=1e-3, atol=5e-4)


def test_everything_a_run_holds_has_the_size_of_the_active_weights() -> None:
    model, optimizer, topology = start(ALGORITHMS["set"], packed=True)
    correction = Agent().attach(model, topology)
    correction.refresh(batches(), loss_fn)
    for x, y in batches(4):
        correction.backward(loss_fn, x, y)
        held = [optimizer.state[layer.parameter].get("momentum_buffer") for layer in topology.layers]
        held += [layer.parameter.grad for layer in topology.layers]
        for layer, tensor in zip([*topology.layers] * 2, held, strict=True):
            assert tensor is None or tensor.shape == (layer.active,)
        optimizer.step()
        optimizer.zero_grad()
    others = sum(p.numel() for p in model.parameters()) - topology.active
    assert correction.mode.vector is not None
    assert correction.mode.vector.size == topology.active + others
    assert (
        sum(t.numel() for n, t in correction.state_dict()["snapshot"].items() if n.endswith("values"))
        == topology.active
    )


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_probe_records_the_dense_gradient(density: float, stride: int) -> None:
    """Judged by torch's own gradient of the dense layer in float64."""
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 6, 3, stride=stride, padding=1, groups=1)
    model = pack(nn.Sequential(layer), {"0.weight": torch.rand(6, 5, 3, 3) < density})
    packed = next(module for module in model.modules() if isinstance(module, PackedLayer))
    packed.open_probe()
    x, target = torch.randn(19, 5, 9, 9), torch.randn(19, 6, *((9, 9) if stride == 1 else (5, 5)))
    (model(x) * target).sum().backward()
    assert packed.probe is not None
    found = packed.probe.grad
    assert found is not None
    weight = packed.weight.detach().double().requires_grad_()
    (F.conv2d(x.double(), weight, None, stride, 1) * target.double()).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(found.double(), weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_growth_sees_the_sum_where_a_loss_uses_the_model_twice(density: float) -> None:
    """As TRADES does; a pass whose step was not taken does not count."""
    torch.manual_seed(0)
    algorithm = SNFS(sparsity=0.4, every=3, distribution={"*": density})
    model = pack(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)), algorithm)
    topology = algorithm.attach(model, sgd(model), STEPS)
    (layer,) = topology.layers
    x, other = torch.randn(9, 12), torch.randn(9, 12)
    model(x).square().sum().backward()  # its step is not taken
    topology.optimizer.zero_grad()
    (model(x).square().sum() + model(other).pow(3).sum()).backward()
    weight = layer.weight.view(7, 12).double().requires_grad_()
    bias = next(p for n, p in model.named_parameters() if n.endswith("bias")).detach().double()
    loss = F.linear(x.double(), weight, bias).square().sum() + F.linear(other.double(), weight, bias).pow(3).sum()
    loss.backward()
    assert layer.gradient is not None
    assert weight.grad is not None
    torch.testing.assert_close(layer.gradient.double(), weight.grad.reshape(-1), rtol=1e-4, atol=1e-4)


def test_rigl_records_the_gradients_of_inactive_weights_only_at_updates() -> None:
    model, optimizer, topology = start(ALGORITHMS["rigl"], packed=True)
    for number, (x, y) in enumerate(batches(), 1):
        loss_fn(model, x, y).backward()
        for layer in topology.layers:
            assert isinstance(layer, PackedWeight)
            if number % 3 or number > 6:
                assert layer.growth is None
            else:
                assert layer.growth is not None
                assert layer.growth.shape == layer.mask().shape
                assert layer.active == layer.size or layer.growth[~layer.mask()].any()
                torch.testing.assert_close(layer.growth[layer.mask()], layer.parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - {"sgd"}))
def test_corrected_gradients_are_those_of_masked_storage(name: str) -> None:
    """With a topology update between refresh and step; per coordinate, wherever both storages have one."""
    algorithm = SET(sparsity=0.9, every=3)
    found = []
    for packed in (False, True):
        model, optimizer, topology = start(algorithm, packed, net=smooth)
        correction = CORRECTIONS[name]().attach(model, topology, STEPS)
        gradients = []
        for epoch in range(2):
            data = batches(4)
            correction.refresh(data, loss_fn, epoch)
            for index, (x, y) in enumerate(data):
                correction.backward(loss_fn, x, y, index=index)
                gradients.append(
                    torch.cat(
                        [
                            p.grad.reshape(-1)[layer.mask().reshape(-1)] if layer.index is None else p.grad
                            for layer in topology.layers
                            if (p := layer.parameter).grad is not None
                        ]
                    )
                )
                optimizer.step()
                optimizer.zero_grad()
        found.append(gradients)
        assert topology.updates == 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("every", [1, 4])
def test_bsr_net_keeps_its_budget_and_its_signs_when_packed(every: int) -> None:
    algorithm = BSRNet(sparsity=0.9, distribution="uniform", rewire_every=every)
    dense = small()
    signs = {name: torch.where(p.detach() < 0, -1, 1) for name, p in dense.named_parameters()}
    model, optimizer, topology = start(algorithm, packed=True)
    budget = sum(layer.final for layer in topology.layers)
    for number, (x, y) in enumerate(batches(), 1):
        (30 * loss_fn(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert topology.active == budget
        for name, weight in unpack(model)[0].items():
            if name in topology.masks:
                assert (weight * signs[name] >= 0).all()
        if number % every == 0:
            assert all((layer.parameter.abs() > 0).all() for layer in topology.layers)
    assert topology.updates == STEPS // every
    for layer in topology.layers:
        assert optimizer.state[layer.parameter]["momentum_buffer"].shape == (layer.active,)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_a_copy_of_model_optimizer_and_topology_continues_alike(packed: bool, between: bool) -> None:
    """Copied before an update step, or between its backward pass and its optimizer step."""
    model, optimizer, topology = start(ALGORITHMS["rigl"], packed)
    data = batches()
    for x, y in data[:2]:
        loss_fn(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if between:
        loss_fn(model, *data[2]).backward()
    twins = [(model, optimizer, topology), copy.deepcopy((model, optimizer, topology))]
    for net, stepper, _ in twins:
        for x, y in data[2:]:
            if not between or x is not data[2][0]:
                loss_fn(net, x, y).backward()
            stepper.step()
            stepper.zero_grad()
    for one, other in zip(*(weights_of(net, own).values() for net, _, own in twins), strict=True):
        assert torch.equal(one, other)
    assert twins[1][2].updates == topology.updates == 2


# Runs of recipes


def trainer(*overrides: str, folder: RunFolder | None = None) -> Trainer:
    raw = apply_overrides(read_recipe("digits"), ["epochs=2", "data.batch=256", "topology.every=3", *overrides])
    return Trainer(make_recipe(raw), folder)


def test_storage_is_packed_from_90_percent_on_and_where_nothing_speaks_against_it() -> None:
    assert trainer().parts.topology.storage == "packed"
    assert trainer().raw["storage"] == "packed"
    for override in ("topology.sparsity=0.8", "storage=masked", "topology=gmp", "topology.growth=corrected"):
        assert trainer(override).parts.topology.storage == "masked"
    assert trainer("topology.sparsity=0.5", "storage=packed").parts.topology.storage == "packed"


@pytest.mark.parametrize(
    ("override", "message"),
    [("topology.growth=corrected", "inactive weights"), ("storage=dense", "storage")],
)
def test_what_cannot_be_packed_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        trainer("storage=packed", override)
    assert "\n" not in str(error.value)


PIPELINES = [
    ("topology=set",),
    ("topology=rigl", "correction=agent", "correction.mode=recompute"),
    ("topology=snfs", "correction=mvr"),
    ("topology=bsr-net", "topology.distribution=uniform"),
    ("topology=set", "optimizer=adamw", "optimizer.lr=0.002", "correction=agent"),
    ("topology=gmp", "correction=saga"),
]
HALF = ("topology=rigl", "correction=agent", "correction.mode=replay", "precision=bf16", "model=small")


def steps(runner: Trainer, count: int) -> None:
    """Take steps without the end of an epoch."""
    runner.parts.model.train()
    for _ in range(count):
        runner.take_step()


def recipe_of(pipeline: tuple[str, ...], *more: str) -> dict[str, Any]:
    """Epochs of six steps, and an update at every second one."""
    raw = apply_overrides(read_recipe("digits"), ["epochs=2", "data.batch=256", "topology.every=2", *pipeline])
    return apply_overrides(raw, more)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(p)[:40])
def test_a_checkpoint_goes_to_packed_and_back_without_loss(pipeline: tuple[str, ...]) -> None:
    runners = {
        storage: Trainer(make_recipe(recipe_of(pipeline, f"storage={storage}"))) for storage in ("masked", "packed")
    }
    steps(runners["masked"], 3)
    before = copy.deepcopy(runners["masked"].state_dict())
    runners["packed"].load_state_dict(before)
    there = copy.deepcopy(runners["packed"].state_dict())
    assert there["storage"] == "packed"
    again = Trainer(make_recipe(recipe_of(pipeline, "storage=masked")))
    again.load_state_dict(there)
    if "topology=bsr-net" in pipeline:  # packed storage has no momentum at inactive indices
        masks = again.parts.topology.masks
        for name, mask in masks.items():
            before["optimizer"][name]["momentum_buffer"] *= mask
    assert_same(again.state_dict(), before)
    for runner in runners.values():  # and training continues alike
        steps(runner, 2)
    masked, vectors = (weights_of(r.parts.model, r.parts.topology) for r in runners.values())
    if "topology=bsr-net" not in pipeline:  # which draws its noise by storage
        for key, tensor in masked.items():
            torch.testing.assert_close(vectors[key], tensor, rtol=1e-2, atol=1e-3)


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(other, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(other, dict):
        assert set(one) == set(other), path
        for key in other:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(other, list | tuple):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}/{i}")
    else:
        assert one == other, path


@pytest.mark.parametrize("pipeline", [*PIPELINES, HALF], ids=lambda p: "-".join(p)[-40:])
def test_a_packed_run_killed_in_mid_epoch_continues_bit_for_bit(pipeline: tuple[str, ...], tmp_path: Path) -> None:
    convolutional = pipeline in (PIPELINES[0], HALF)  # the others need no model that is slower
    faster = ["bn_recalibration_batches=1", *([] if convolutional else ["model=mlp", "model.hidden=32"])]
    raw = recipe_of(pipeline, "storage=packed", "checkpoint.steps=2", *faster)
    whole = Trainer(make_recipe(raw), RunFolder.create(tmp_path / "whole", raw))
    whole.run()

    class Killed(Exception):
        pass

    broken = Trainer(make_recipe(raw), RunFolder.create(tmp_path / "broken", raw))
    taken, step = [0], broken.take_step

    def dying() -> None:
        taken[0] += 1
        if taken[0] == 10:
            raise Killed
        step()

    broken.take_step = dying  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.run()
    assert broken.folder is not None
    broken.folder.release()
    again = resume(RunFolder.open(tmp_path / "broken"), make_recipe(raw))
    again.run()
    own, other = again.state_dict(), whole.state_dict()
    for state in (own, other):
        del state["seconds"]
    assert_same(own, other)


# One bit per index


@given(flags=st.lists(st.booleans(), min_size=1, max_size=70), data=st.data())
def test_bits_are_what_was_put_in(flags: list[bool], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(flags) - 1), max_size=20))
    packed = pack_bits(torch.tensor(flags))
    assert packed.numel() == -(-len(flags) // 8)
    assert get_bits(packed, len(flags)).tolist() == flags
    assert get_bits(packed, len(flags), torch.tensor(places, dtype=torch.int32)).tolist() == [
        flags[p] for p in places
    ]
    set_bits(packed, torch.tensor(places, dtype=torch.int32))
    expected = np.array(flags)
    expected[places] = True
    assert get_bits(packed, len(flags)).tolist() == expected.tolist()
