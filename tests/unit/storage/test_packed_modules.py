"""Packed layers keep ties, types, frozen parameters, attributes and padding of their layers, or refuse them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise.deploy.frozen import freeze
from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.kernels.blocked import to_blocked
from equipoise.storage.blocked_norm import BlockedBatchNorm
from equipoise.storage.pack import unpack
from equipoise.storage.packed_modules import PackedLayer, packed
from equipoise.topology import SET
from equipoise.topology.packing import pack, why_not
from sparse_helpers import convolutions, linear, packed_model

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


# -- tied weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


def weight_tied() -> nn.Module:
    model = Tied()
    model.b.weight = model.a.weight
    return model


def module_shared() -> nn.Module:
    model = Tied()
    model.b = model.a
    return model


@pytest.mark.parametrize("make", [weight_tied, module_shared])
@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_tied_weights_are_refused(make: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(UserError, match=r'"a\.weight" and "b\.weight" are one tensor'):
        pack(make(), {name: torch.ones(6, 6).bool()})


@pytest.mark.parametrize("make", [weight_tied, module_shared])
def test_tied_weights_are_left_out_as_the_error_says(make: Callable[[], nn.Module]) -> None:
    model = make()
    reason = why_not(model, SET(sparsity=0.5))
    assert reason is not None
    assert 'exclude=("a",)' in reason
    assert why_not(model, SET(sparsity=0.5, exclude=("a",))) is None
    mine = pack(model, SET(sparsity=0.5, exclude=("a",)))
    assert mine.a.weight is mine.b.weight
    assert unpack(mine)[0].keys() == model.state_dict().keys()
    assert isinstance(mine.c, PackedLayer)


def test_a_tied_bias_is_tied() -> None:
    model = Tied()
    model.b.bias = model.c.bias
    with pytest.raises(UserError, match=r'"b.bias" and "c.bias" are one tensor.*exclude=\("c",\)'):
        pack(model, {"c.weight": torch.ones(6, 6).bool()})
    assert why_not(Tied(), SET(sparsity=0.5)) is None


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x).relu())


def test_a_layer_used_twice_under_one_name_is_packed() -> None:
    model, x = Twice(), torch.rand(9, 6)
    assert why_not(model, SET(sparsity=0.5)) is None
    mine = packed_model(model)
    mine(x).sum().backward()
    model(x).sum().backward()
    mask = mine.a.mask
    torch.testing.assert_close(mine.a.values.grad, model.a.weight.grad[mask])


# -- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [convolutions, linear], ids=["convolutions", "linear"])
def test_autocast_casts_up_for_packed_layers(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    mine = packed_model(make())
    shape = (9, 1, 8, 8) if make is convolutions else (9, 12)
    x = torch.rand(shape).to(dtype).requires_grad_()
    exact = x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = mine(x)
        frozen = freeze(mine)(x)
    wanted = mine(exact)
    assert out.dtype == frozen.dtype == torch.float32
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(frozen, wanted.detach())
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, exact.grad.to(dtype))  # type: ignore[union-attr]


def test_autocast_leaves_other_types_refused() -> None:
    mine = packed_model(linear())
    for dtype in (torch.int64, torch.float64):
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UserError, match="float32"):
            mine(torch.ones(2, 12, dtype=dtype))
    with torch.autocast("cpu", enabled=False), pytest.raises(UserError, match="float32"):
        mine(torch.ones(2, 12, dtype=torch.bfloat16))


def test_autocast_trains_a_packed_model_between_dense_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    mine = pack(model, {"2.weight": torch.rand(8, 8) < 0.5})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mine(torch.rand(5, 6)).float().square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in mine.parameters())


# -- frozen parameters


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: nn.Conv2d(6, 6, 3), lambda: nn.Conv1d(6, 6, 1)])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_frozen_parameters_stay_frozen(make: Callable[[], nn.Module], which: str) -> None:
    model = nn.Sequential(make())
    model.get_parameter(f"0.{which}").requires_grad_(False)
    mine = packed_model(model)
    expected = {"0.values": which == "bias", "0.bias": which == "weight"}
    assert {name: parameter.requires_grad for name, parameter in mine.named_parameters()} == expected
    mine(torch.rand(2, 6, 5, 5)[(..., *[0] * (4 - mine.get_submodule("0").dims))]).sum().backward()
    for name, parameter in mine.named_parameters():
        assert (parameter.grad is not None) is expected[name]


# -- blocked activations


def test_packed_layers_refuse_blocked_maps_of_wrong_channels_and_dimensions() -> None:
    layer = packed(nn.Conv2d(3, 4, 1), torch.rand(4, 3, 1, 1) < 0.5)
    assert layer is not None
    with pytest.raises(UserError, match="takes 3 channels"):
        layer(to_blocked(torch.rand(2, 2, 5, 5)))
    for shape in ((2, 3), (2, 3, 5)):
        with pytest.raises(UserError, match="4 dimensions"):
            layer(to_blocked(torch.rand(shape)))
    with pytest.raises(UserError, match="dimensions"):
        packed(nn.Linear(3, 4), torch.rand(4, 3) < 0.5)(torch.tensor(1.0))  # type: ignore[misc]


@pytest.mark.parametrize("training", [True, False])
def test_norms_refuse_blocked_maps_of_wrong_channels(training: bool) -> None:
    norm = BlockedBatchNorm.from_torch(nn.BatchNorm2d(40)).train(training)
    with pytest.raises(UserError, match="takes 40 channels, the input has 2"):
        norm(to_blocked(torch.rand(2, 2, 5, 5)))


# -- attributes


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv1d(6, 4, 5, stride=2, padding=1, dilation=2, groups=2),
        nn.Conv2d(6, 4, (3, 1), stride=(1, 2), padding=(1, 0)),
        nn.Conv2d(6, 4, 3, padding="same"),
    ],
)
def test_a_packed_layer_has_the_attributes_of_its_layer(layer: nn.Module) -> None:
    mine = packed_model(nn.Sequential(copy.deepcopy(layer))).get_submodule("0")
    public = {name for name in vars(layer) if not name.startswith("_")}
    assert {name: getattr(mine, name) for name in public} == {name: getattr(layer, name) for name in public}


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x).relu()[:, : self.conv.out_channels] * self.conv.stride[0]
        return self.head(maps.reshape(-1, self.head.in_features))


def test_a_forward_may_ask_a_layer_for_its_size() -> None:
    model, x = Asks(), torch.randn(3, 3, 8, 8)
    mine = packed_model(model)
    torch.testing.assert_close(mine(x), model(x))
    torch.testing.assert_close(freeze(mine)(x), model(x).detach())


# -- padding by name, and layers without a packed form


@pytest.mark.parametrize("images", [2, 17])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 5, 3, padding="same"), (3, 9, 7)),
        (nn.Conv2d(3, 5, (1, 5), padding="same"), (3, 9, 7)),
        (nn.Conv2d(3, 5, (2, 3), padding="same", dilation=(2, 1)), (3, 9, 7)),
        (nn.Conv2d(3, 6, 3, padding="valid", stride=2, groups=3), (3, 9, 7)),
        (nn.Conv1d(3, 5, 5, padding="same"), (3, 9)),
        (nn.Conv1d(3, 5, 4, padding="same", dilation=2), (3, 9)),
        (nn.Conv1d(3, 5, 3, padding="valid"), (3, 9)),
    ],
)
def test_padding_by_name(layer: nn.Module, shape: tuple[int, ...], images: int) -> None:
    model, x = nn.Sequential(copy.deepcopy(layer)), torch.rand(images, *shape)
    mine = packed_model(model)
    torch.testing.assert_close(mine(x), model(x))
    torch.testing.assert_close(freeze(mine)(x), model(x).detach())


# -- states of other layers, and parameters of other types


def first_layer(model: nn.Module) -> PackedLayer:
    return next(module for module in model.modules() if isinstance(module, PackedLayer))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: {"0.index": s["0.index"] + 10**6}, r"index has 1000105; the weight has 108 elements"),
        (lambda s: {"0.index": s["0.index"] - 50}, "index has -"),
        (lambda s: {"0.index": s["0.index"].flip(0)}, "index must be ascending"),
        (lambda s: {"0.index": s["0.index"] * 0}, "without duplicates"),
        (lambda s: {"0.index": s["0.index"].float()}, "index must be a vector of int32 or int64"),
        (lambda s: {"0.index": s["0.index"][:3]}, r"values of torch.float32 do not fit \[3\] indices"),
        (lambda s: {"0.values": s["0.values"][:3]}, r"\[3\] values of torch.float32 do not fit"),
        (lambda s: {"0.values": s["0.values"].long()}, "values of torch.int64 do not fit"),
        (lambda s: {"0.values": 3}, "two tensors"),
        (lambda s: {"0.values": None}, "two tensors"),
        (lambda s: {"0.values": torch.ones(200), "0.index": torch.arange(200)}, "index has 199; the weight has 108"),
    ],
)
def test_a_state_that_is_not_that_of_the_layer_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, object]], told: str
) -> None:
    model = packed_model(linear())
    state = model.state_dict()
    with pytest.raises(UserError, match=rf'^"0" cannot be loaded: .*{told}') as raised:
        model.load_state_dict({**state, **change(state)})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("metadata", [True, False])
def test_a_state_of_a_wider_layer_is_refused(metadata: bool) -> None:
    """The numbers of active weights are equal, so the values alone would fit."""
    wide, narrow = (
        pack(nn.Sequential(nn.Linear(4, n)), {"0.weight": torch.arange(4 * n).view(n, 4) % (n // 2) == 0})
        for n in (64, 8)
    )
    state = wide.state_dict() if metadata else dict(wide.state_dict())
    assert state["0.values"].shape == narrow.state_dict()["0.values"].shape
    with pytest.raises(
        UserError, match=r'^"0" cannot be loaded: (it was saved from a weight of \(64, 4\)|index has)'
    ):
        narrow.load_state_dict(state)


def test_a_state_of_a_transposed_layer_is_refused() -> None:
    """All indices are in range; only the metadata tells the shapes apart."""
    one, other = (
        pack(nn.Sequential(nn.Linear(*size, bias=False)), {"0.weight": torch.ones(size[::-1]).bool()})
        for size in ((4, 6), (6, 4))
    )
    with pytest.raises(UserError, match=r"it was saved from a weight of \(6, 4\); this one has \(4, 6\)"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_of_other_integers_and_floats_is_loaded(assign: bool) -> None:
    model, x = packed_model(linear()), torch.rand(3, 12)
    wanted = model(x)
    state = {name: t.long() if name.endswith("index") else t.double() for name, t in model.state_dict().items()}
    other = packed_model(linear())
    other.load_state_dict(state, assign=assign)
    assert first_layer(other).index.dtype == torch.int32
    if assign:
        with pytest.raises(UserError, match="packed weights are float32"):
            other(x)
        other.float()
    torch.testing.assert_close(other(x), wanted)


def test_an_index_that_was_changed_in_place_is_checked() -> None:
    for density in (0.3, 1.0):
        model = pack(linear(), {"0.weight": torch.arange(108).view(9, 12) < 108 * density})
        first_layer(model).index[-1] = 10**6
        with pytest.raises(UserError, match="index has 1000000; the weight has 108 elements"):
            model(torch.rand(3, 12))


@pytest.mark.parametrize("images", [2, 20])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_of_other_types_are_refused_as_by_torch(dtype: torch.dtype, training: bool, images: int) -> None:
    model = packed_model(convolutions()).train(training)
    next(m for m in model.modules() if isinstance(m, BlockedBatchNorm)).to(dtype)
    with pytest.raises(
        UserError, match=rf"weight of the norm: packed layers compute with float32 on cpu, not {dtype}"
    ):
        model(torch.rand(images, 1, 8, 8))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_norms_of_another_length_are_refused(name: str, frozen: bool) -> None:
    model = packed_model(convolutions())
    norm = next(m for m in model.modules() if isinstance(m, BlockedBatchNorm))
    getattr(norm, name).data = torch.ones(1)
    with pytest.raises(UserError, match=rf"{name} of a BatchNorm of 8 channels has the shape \[1\]"):
        (freeze(model) if frozen else model)(torch.rand(3, 1, 8, 8))


@pytest.mark.skipif(not library.available(), reason=library.reason())
def test_denser_layers_stay_sparse_if_their_weights_form_blocks() -> None:
    torch.manual_seed(0)
    layer, density = nn.Conv2d(256, 256, 3), 0.7
    blocks = (torch.rand(16, 1, 256, 3, 3) < density).expand(-1, 16, -1, -1, -1).reshape(layer.weight.shape)
    single = torch.rand_like(layer.weight) < density
    in_blocks, unstructured = packed(layer, blocks), packed(layer, single)
    assert in_blocks is not None
    assert unstructured is not None
    assert not in_blocks.dense_in_blocks
    assert unstructured.dense_in_blocks


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("kernel", "size"), [((4, 4), (12, 8)), ((2, 3), (9, 11))])
def test_a_convolution_of_patches_is_that_of_torch(
    kernel: tuple[int, int], size: tuple[int, int], channels_last: bool
) -> None:
    torch.manual_seed(0)
    dense = nn.Conv2d(40, 48, kernel, stride=kernel)
    mask = torch.rand(dense.weight.shape) < 0.05
    with torch.no_grad():
        dense.weight.mul_(mask)
    layer = packed(dense, mask)
    assert layer is not None
    assert layer.how() == "sparse"
    layer.open_probe()
    x = torch.randn(3, 40, *size)
    x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out, expected = layer(mine), dense.double()(exact)
    assert out.stride() == expected.stride()
    dy = torch.randn_like(out)
    out.backward(dy)
    expected.backward(dy.double())
    found = (out, mine.grad, layer.values.grad, layer.bias.grad, layer.probe.grad)
    wanted = (expected, exact.grad, dense.weight.grad[mask], dense.bias.grad, dense.weight.grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


ESTIMATE = PackedLayer.estimate_dense  # before the fixture of all tests replaces it


@pytest.mark.skipif(not library.available(), reason=library.reason())
@pytest.mark.parametrize(("tokens", "runs_dense"), [(4, True), (4096, False)])
def test_a_small_batch_of_a_small_layer_runs_dense(
    tokens: int, runs_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedLayer, "estimate_dense", ESTIMATE)
    torch.manual_seed(0)
    dense = nn.Linear(128, 128)
    mask = torch.rand(dense.weight.shape) < 0.05
    with torch.no_grad():
        dense.weight.mul_(mask)
    layer, called = packed(dense, mask), []
    assert layer is not None
    run = layer.dense_forward
    monkeypatch.setattr(layer, "dense_forward", lambda x: called.append(x.shape[0]) or run(x))
    for batch in (tokens, 64, tokens):  # other batches before do not matter
        x = torch.randn(batch, 128, requires_grad=True)
        mine, theirs = (torch.autograd.grad(net(x).square().sum(), x)[0] for net in (layer, dense))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert called.count(tokens) == 2 * runs_dense
    assert copy.deepcopy(layer)._runs_dense(x.detach()) is runs_dense


@pytest.mark.skipif(not library.available(), reason=library.reason())
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(3, 4, 3), torch.zeros(3, 8, 8)),
        (nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 2, 8, 8)),
        (nn.Conv2d(3, 4, 3), torch.zeros(2, 4, 8, 8)),
        (nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 2, 8)),
        (nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8, dtype=torch.float64)),
        (nn.Conv2d(3, 4, 2, stride=2), torch.zeros(2, 3, 1, 8)),
        (nn.Conv1d(3, 4, 3), torch.zeros(2, 3, 2)),
        (nn.Linear(3, 4), torch.tensor(0.0)),
        (nn.Linear(3, 4), torch.zeros(2, 4)),
        (nn.Linear(3, 4), torch.zeros(2, 3, dtype=torch.float16)),
    ],
)
def test_both_kernels_refuse_the_same_inputs(
    layer: nn.Module, x: Tensor, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one runs depends on the batch, so that a model would else refuse an input or not by its size."""
    monkeypatch.setattr(PackedLayer, "estimate_dense", lambda *_: dense)
    mine = packed(layer, torch.ones_like(layer.get_parameter("weight")).tril() > 0)
    assert mine is not None
    with pytest.raises(UserError):
        mine(x)


# -- what the guide says


@torch.no_grad()
def test_only_values_change_the_weight() -> None:
    model = pack(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(4, 4)), SET(sparsity=0.8))
    for layer in model.modules():
        if isinstance(layer, PackedLayer):
            before = layer.weight
            layer.weight.zero_()
            assert torch.equal(layer.weight, before)
            layer.values.mul_(2)
            assert torch.equal(layer.weight.flatten()[layer.index.long()], layer.values)
            assert torch.equal(layer.weight, 2 * before)


def test_packed_convolutions_take_batches() -> None:
    layer = packed(nn.Conv2d(8, 8, 3), torch.ones(8, 8, 3, 3).bool())
    assert layer is not None
    image = torch.randn(8, 5, 5)
    assert layer(image.unsqueeze(0)).shape == (1, 8, 3, 3)
    with pytest.raises(UserError, match=r"takes a batch of 4 dimensions, not \(8, 5, 5\)"):
        layer(image)
