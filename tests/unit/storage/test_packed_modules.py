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
from equipoise.storage.pack import unpack
from equipoise.storage.packed_modules import BlockedBatchNorm, PackedLayer, packed
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


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Conv2d(3, 5, 2, padding="same"), "Conv2d"),
        (nn.Conv1d(3, 5, 4, padding="same"), "Conv1d"),
        (nn.Conv3d(3, 5, 3), "Conv3d"),
        (nn.ConvTranspose2d(3, 5, 3), "ConvTranspose2d"),
    ],
)
def test_a_refusal_names_the_type_and_a_remedy(layer: nn.Module, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer))
    with pytest.raises(UserError, match=rf'"1.weight" of a {kind}:.*exclude=\("1",\).*masked storage'):
        pack(model, {"1.weight": torch.ones_like(model.get_parameter("1.weight")).bool()})
    assert kind in str(why_not(model, SET(sparsity=0.5)))
    assert isinstance(pack(model, SET(sparsity=0.5, exclude=("1",))).get_submodule("0"), PackedLayer)
