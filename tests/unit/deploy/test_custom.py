"""Custom models as small files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.deploy.frozen import is_frozen
from equipoise.sparse import pack
from equipoise.topology.algorithm import Algorithm


class Custom(nn.Module):
    """A model that is not in the catalogue, with a buffer that is a matrix and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 16, 10)
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(nn.functional.max_pool2d(x, 2)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def trained(storage: str) -> nn.Module:
    """A model after a few steps of training, which change statistics and weights."""
    torch.manual_seed(0)
    algorithm: Algorithm = eq.SET(sparsity=0.95, every=2)
    model: nn.Module = Custom()
    model = pack(model, algorithm) if storage == "packed" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if storage != "dense":
        algorithm.attach(model, optimizer, total_steps=10)
    for _ in range(4):
        nn.functional.cross_entropy(model(torch.randn(16, 3, 8, 8)), torch.randint(10, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("storage", ["dense", "masked", "packed"])
def test_a_model_comes_back_as_it_was(tmp_path: Path, storage: str) -> None:
    model, path = trained(storage), tmp_path / "custom.safetensors"
    eq.save(model, path)
    other = Custom()
    before = copy.deepcopy(other.state_dict())
    dense, fast = eq.load(path, dense=True, into=other), eq.load(path, into=other)
    x = torch.randn(20, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
    for found in (dense, fast):
        torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-5)
    assert is_frozen(fast) or storage == "dense"
    state = eq.sparse.unpack(model)[0] if storage == "packed" else model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in dense.state_dict().items())
    assert not any(p.requires_grad for p in dense.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())  # load filled a copy


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_cannot_be_packed_whole_run_too(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    eq.Static(sparsity=0.9).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    eq.save(model, tmp_path / "tied")
    found = eq.load(tmp_path / "tied", into=Tied().to(dtype))
    x = torch.randn(9, 64, dtype=dtype)
    torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_file_is_as_small_as_the_active_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    model.register_buffer("table", torch.randn(4, 4))
    eq.Static(sparsity=0.95).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = {}
    for values in ("float32", "bf16", "int8"):
        eq.save(model, tmp_path / values, values)
        sizes[values] = (tmp_path / values).stat().st_size
    dense = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert sizes["int8"] < sizes["bf16"] < sizes["float32"] < dense / 10
    for values, error in (("bf16", 2**-8), ("int8", 1 / 127)):
        found = eq.load(tmp_path / values, dense=True, into=model)
        for (name, p), q in zip(model.named_parameters(), found.parameters(), strict=True):
            assert (p - q).abs().max() <= error * p.abs().max(), name
            assert p.dim() < 2 or not torch.equal(p, q)
        assert torch.equal(found.get_buffer("table"), model.get_buffer("table"))


class Slashes(nn.Module):
    def __init__(self, second: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a/b": nn.Linear(40, 40), "norm/": nn.BatchNorm1d(40)})
        self.register_parameter(second, nn.Parameter(torch.randn(40)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["norm/"](self.parts["a/b"](x))  # type: ignore[no-any-return]


def test_names_with_slashes(tmp_path: Path) -> None:
    model = Slashes("x/values").eval()
    eq.Static(sparsity=0.9).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    eq.save(model, tmp_path / "custom")
    x = torch.randn(3, 40)
    for dense in (True, False):
        found = eq.load(tmp_path / "custom", dense, into=Slashes("x/values"))
        torch.testing.assert_close(found(x), model(x).detach())
    model.register_parameter("x", nn.Parameter(torch.randn(4, 4)))  # its values are called x/values in the file
    with pytest.raises(eq.UserError, match='"x/values" is the name of a part of "x"'):
        eq.save(model, tmp_path / "clash")
    assert not (tmp_path / "clash").exists()


class Told(nn.Linear):
    def get_extra_state(self) -> str:
        return "words"


def test_every_error_is_one_line(tmp_path: Path) -> None:
    model, path = trained("masked"), tmp_path / "custom.safetensors"
    eq.save(model, path)
    with pytest.raises(eq.UserError, match="exists; force=True"):
        eq.save(model, path)
    eq.save(model, path, force=True)
    with pytest.raises(eq.UserError, match=r"file of a custom model.*into=model"):
        eq.load(path)
    with pytest.raises(eq.UserError, match="does not fit this model"):
        eq.load(path, into=nn.Linear(3, 3))
    wider = Custom()
    wider.head = nn.Linear(32 * 16, 11)
    with pytest.raises(eq.UserError, match="does not fit this model"):
        eq.load(path, into=wider)
    with pytest.raises(eq.UserError, match="is not a tensor"):
        eq.save(Told(3, 3), tmp_path / "told")
    with pytest.raises(eq.UserError, match="no type of values"):
        eq.save(model, tmp_path / "x", "int4")
    with pytest.raises(eq.UserError, match="there is no file"):
        eq.load(tmp_path / "none", into=Custom())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(eq.UserError, match="checksum"):
        eq.load(path, into=Custom())
    nn.init.constant_(model.get_parameter("head.bias"), float("nan"))
    with pytest.raises(eq.UserError, match="is not finite; there is nothing to deploy"):
        eq.save(model, tmp_path / "nan")
    assert not (tmp_path / "nan").exists()


class Views(nn.Module):
    """A forward that relies on the memory layout of its activation, as `view` does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.head(y.view(y.shape[0], -1))


def test_a_forward_that_views_its_maps_is_loaded(tmp_path: Path) -> None:
    model, x = Views().eval(), torch.randn(3, 3, 8, 8)
    eq.save(model, tmp_path / "model")
    torch.testing.assert_close(eq.load(tmp_path / "model", into=model)(x), model(x))
