"""Packed models with bf16 activations against the dense models they came from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.models.resnet import resnet18
from equipoise.storage.pack import unpack
from equipoise.topology.packing import pack

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


def net() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
    layers = [first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def masks(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.rand(p.shape) < 0.05 for name, p in model.named_parameters() if p.dim() > 1}


def dense(model: nn.Module) -> nn.Module:
    """The model with its inactive weights set to zero, in float64."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, mask in masks(model).items():
            model.get_parameter(name).mul_(mask)
    return model.double()


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    F.cross_entropy(model(x), y).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def saved_types(model: nn.Module, x: Tensor) -> set[torch.dtype]:
    """Types of the activations that a forward pass keeps for the backward pass."""
    seen = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim() == 5:
            seen.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    return seen


def test_outputs_are_those_of_the_dense_model_up_to_rounding() -> None:
    x, model = torch.randn(40, 3, 8, 8), net()
    mine = pack(model, masks(model), precision="bf16").train()
    with torch.no_grad():
        expected, found = dense(model).train()(x.double()), mine(x)
    assert found.dtype is torch.float32
    # Four layers, each with rounded inputs and outputs: about eight independent errors of at most 2^-8.
    assert (found - expected).norm() < 8**0.5 * 2**-8 * expected.norm()


def test_gradients_are_as_good_as_those_of_autocast() -> None:
    """The error is that of a few ReLUs and maxima which rounding moves to the other side of a kink."""
    mine, torchs = {}, {}
    for seed in range(4):
        torch.manual_seed(seed)
        x, y, model = torch.randn(40, 3, 8, 8), torch.randint(10, (40,)), net()
        exact = gradients(dense(model).train(), x.double(), y)
        packed = pack(model, masks(model), precision="bf16").train()
        found = gradients(packed, x, y)
        with torch.autocast("cpu", torch.bfloat16):
            rival = gradients(dense(model).float().train(), x, y)
        for name in ("0", "3", "8"):
            index = packed.get_buffer(f"{name}.index").long()
            wanted, other = (g[f"{name}.weight"].flatten()[index] for g in (exact, rival))
            mine[seed, name] = float((found[f"{name}.values"] - wanted).norm() / wanted.norm())
            torchs[seed, name] = float((other - wanted).norm() / wanted.norm())
    assert sum(mine.values()) < 1.5 * sum(torchs.values())
    assert all(error < 0.01 for (_, name), error in mine.items() if name == "8")  # after the last kink


@pytest.mark.parametrize("under_autocast", [False, True])
def test_activations_are_stored_in_bf16_and_parameters_in_float32(under_autocast: bool) -> None:
    model = pack(net(), masks(net()), precision="bf16").train()
    x = torch.rand(32, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        assert saved_types(model, x) == {torch.bfloat16}
        out = model(x)
    out.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.dtype is parameter.grad.dtype is torch.float32
    assert all(b.dtype is torch.float32 for b in model.buffers() if b.is_floating_point())
    assert saved_types(pack(net(), masks(net())), x) == {torch.float32}


@pytest.mark.parametrize("images", [2, 16])
def test_a_batch_that_fits_one_block_of_float32_runs_in_float32(images: int) -> None:
    model, exact = (pack(net(), masks(net()), precision=precision).train() for precision in ("bf16", "float32"))
    exact.load_state_dict(model.state_dict())
    for batch, dtype in ((images, torch.float32), (17, torch.bfloat16), (images, torch.float32)):
        x = torch.rand(batch, 3, 8, 8)
        assert saved_types(model, x) == {dtype}
        assert torch.equal(model(x), exact(x)) is (dtype is torch.float32)


def test_copies_keep_the_precision_and_unpacking_loses_nothing() -> None:
    model = pack(net(), masks(net()), precision="bf16").eval()
    x = torch.rand(32, 3, 8, 8)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved_types(twin, x) == {torch.bfloat16}
        assert torch.equal(twin(x), model(x))
    exact = dense(net())
    state, _ = unpack(model)
    for name, tensor in exact.state_dict().items():
        assert torch.equal(state[name].double(), tensor.double()), name


def test_residual_networks_train() -> None:
    torch.manual_seed(0)
    model = resnet18(width=16)
    mine = pack(model, {n: torch.rand(p.shape) < 0.05 for n, p in model.named_parameters() if p.dim() == 4}, "bf16")
    x, y = torch.rand(32, 3, 16, 16), torch.randint(10, (32,))
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(mine(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert saved_types(mine, x) == {torch.bfloat16}
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("precision", ["fp16", "auto", None])
def test_other_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(UserError, match=r'precision must be "float32" or "bf16", not '):
        pack(net(), masks(net()), precision=precision)
