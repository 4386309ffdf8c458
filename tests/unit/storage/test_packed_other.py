"""Layers without a sparse kernel: packed in storage, dense in computation, and named in a warning."""

from __future__ import annotations

import ast
import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import SET
from equipoise.errors import UserError
from equipoise.storage.pack import describe, unpack
from equipoise.storage.packed_modules import PackedConv2d, PackedLayer, PackedLinear
from equipoise.topology.packing import pack, why_not


class Standardised(nn.Conv2d):
    """A convolution that overrides its forward, as some of timm's."""

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Scaled(nn.Conv2d):
    """A convolution with a gain, as timm's ScaledStdConv2d."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(sizes[1], 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.gain, self.bias, self.stride, self.padding)


class Named(nn.Linear):
    """A subclass that computes what its base class computes."""


LAYERS = [
    (nn.Conv2d(3, 5, 2, padding="same"), (3, 9, 7), "equal zero padding"),
    (nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), (3, 9, 7), "equal zero padding"),
    (nn.Conv1d(3, 5, 4, padding="same"), (3, 9), "equal zero padding"),
    (nn.Conv3d(3, 5, 3), (3, 5, 5, 4), "no sparse kernel computes a Conv3d"),
    (nn.ConvTranspose2d(3, 5, 3, stride=2), (3, 4, 4), "no sparse kernel computes a ConvTranspose2d"),
    (Standardised(3, 5, 3), (3, 6, 6), "Standardised overrides its forward"),
    (Scaled(3, 5, 3), (3, 6, 6), "Scaled overrides its forward"),
]


@pytest.mark.parametrize(("layer", "shape", "reason"), LAYERS)
def test_a_layer_without_a_kernel_trains_like_the_masked_one(
    layer: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(layer), nn.Flatten())
    weight = model.get_parameter("0.weight")
    mask = torch.rand(weight.shape) < 0.4
    with torch.no_grad():
        weight.mul_(mask)
    with pytest.warns(UserWarning, match=rf'layers that compute with dense weights: "0" \(.*{reason}.*\)'):
        mine = pack(model, {"0.weight": mask})
    x = torch.randn(2, *shape)
    model(x).square().sum().backward()
    mine(x).square().sum().backward()
    torch.testing.assert_close(mine(x), model(x))
    assert weight.grad is not None
    torch.testing.assert_close(mine.get_parameter("0.values").grad, weight.grad[mask])
    assert describe(mine)["0"].startswith("dense: ")
    state, masks = unpack(mine)
    assert torch.equal(state["0.weight"], weight)
    assert torch.equal(masks["0.weight"], mask)
    torch.testing.assert_close(copy.deepcopy(mine)(x), model(x))
    with torch.no_grad():
        for _ in range(2):  # the second call takes the kept weight
            torch.testing.assert_close(mine.eval()(x), model(x))
        mine.get_parameter("0.values").mul_(2)
        weight.mul_(2)
        torch.testing.assert_close(mine(x), model(x))
    assert mine.get_submodule("0").kernel_size == layer.kernel_size  # type: ignore[union-attr]
    assert type(layer).__name__ in str(why_not(model, SET(sparsity=0.5)))  # a recipe uses masked storage


def test_frozen_parameters_stay_frozen() -> None:
    model = nn.Sequential(nn.Conv3d(2, 3, 2))
    model.get_parameter("0.weight").requires_grad_(False)
    with pytest.warns(UserWarning, match="dense weights"):
        mine = pack(model, {"0.weight": torch.ones(3, 2, 2, 2, 2).bool()})
    assert {name: p.requires_grad for name, p in mine.named_parameters()} == {"0.values": False, "0.bias": True}


def test_other_parameters_of_a_layer_are_kept_and_trained() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Scaled(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)), torch.randn(2, 3, 6, 6)
    with pytest.warns(UserWarning, match=r'dense weights: "0" \(Scaled overrides its forward\)$'):
        mine = pack(model, SET(sparsity=0.5))
    state, masks = unpack(mine)
    assert masks.keys() == {"0.weight", "2.weight"}
    assert state.keys() == model.state_dict().keys()
    assert [name for name, _ in mine.named_parameters()] == ["0.values", "0.bias", "0.gain", "2.values", "2.bias"]
    model.load_state_dict(state)
    for net in (model, mine):
        net(x).square().sum().backward()
    torch.testing.assert_close(mine.get_parameter("0.gain").grad, model.get_parameter("0.gain").grad)
    with torch.no_grad():
        mine.get_parameter("0.gain").mul_(2)
        assert not torch.allclose(mine(x), model(x))
        model.load_state_dict(unpack(mine)[0])
    torch.testing.assert_close(mine(x), model(x))


class Warm(nn.Linear):
    """A linear layer with its base's forward and a parameter that others read."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.temperature = nn.Parameter(torch.ones(()))


def test_other_parameters_of_a_layer_with_a_kernel_are_kept() -> None:
    mine = pack(nn.Sequential(Warm(4, 4)), {"0.weight": torch.ones(4, 4).bool()})
    assert type(mine.get_submodule("0")) is PackedLinear
    assert mine.get_parameter("0.temperature") == 1


def test_a_parameter_with_a_name_of_packed_layers_is_refused() -> None:
    layer = nn.Conv3d(2, 3, 2)
    layer.values = nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match=r'^packed layers have another "values" than a Conv3d; rename it$'):
        pack(nn.Sequential(layer), {"0.weight": torch.ones(3, 2, 2, 2, 2).bool()})


def test_threads_may_call_the_same_layer() -> None:
    model = nn.Sequential(nn.Conv3d(2, 3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = pack(model, {"0.weight": torch.ones(3, 2, 2, 2, 2).bool()})
    inputs = [torch.randn(1, 2, 4, 4, 4) for _ in range(4)]
    found: list[Tensor | None] = [None] * 4

    def run(i: int) -> None:
        for _ in range(20):
            found[i] = mine(inputs[i]).detach()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, found, strict=True):
        torch.testing.assert_close(y, model(x).detach())


def test_a_subclass_that_inherits_its_forward_runs_sparse() -> None:
    model = nn.Sequential(Named(6, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 1, groups=4))
    mine = pack(model, {"0.weight": torch.rand(4, 6) < 0.5, "2.weight": torch.ones(4, 1, 1, 1).bool()})
    assert [type(layer) for layer in mine.modules() if isinstance(layer, PackedLayer)] == [PackedLinear, PackedConv2d]


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        (nn.Sequential(nn.Bilinear(2, 3, 4), nn.GRU(4, 4)), "1.weight_ih_l0", "not the matrix of weights of a GRU"),
        (nn.Sequential(nn.BatchNorm2d(4)), "0.weight", "not the matrix of weights of a BatchNorm2d"),
        (nn.Linear(3, 4), "weight", "wrap it in nn.Sequential"),
    ],
)
def test_other_parameters_are_refused_by_name(model: nn.Module, name: str, told: str) -> None:
    mask = torch.ones_like(model.get_parameter(name)).bool()
    with pytest.raises(UserError, match=rf'^cannot pack "{name}": .*{told}.*masked storage$'):
        pack(model, {name: mask})


class Recurrent(nn.Module):
    """Layers that cannot be packed next to others."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4, bidirectional=True)
        self.first, self.second, self.third, self.fourth = (nn.Linear(4, 4) for _ in range(4))
        self.second.weight = self.first.weight
        self.fourth.bias = self.third.bias
        self.scaled = Scaled(4, 4, 1)
        self.scaled.low_rank = nn.Parameter(torch.ones(4, 2))


def test_all_layers_that_cannot_be_packed_are_named_at_once_with_what_leaves_them_out() -> None:
    algorithm = SET(sparsity=0.5, include="*", exclude=("fc", nn.Conv3d))
    model = Recurrent()
    model.add_module("cube", nn.Conv3d(4, 4, 1))
    with pytest.raises(UserError) as error:
        pack(model, algorithm)
    excluded = '("fc", Conv3d, "rnn", "first", "third", "fourth", "scaled.low_rank")'
    assert str(error.value) == (
        'cannot pack "rnn.weight_ih_l0": it is not the matrix of weights of a LSTM; '
        'the model: "first.weight" and "second.weight" are one tensor, and packing would separate them; '
        'the model: "third.bias" and "fourth.bias" are one tensor, and packing would separate them; and 2 more; '
        f"leave them out with exclude={excluded} or no mask, or use masked storage"
    )
    exclude = ast.literal_eval(excluded.replace(" Conv3d,", ""))
    with pytest.warns(UserWarning, match="dense weights"):
        mine = pack(model, SET(sparsity=0.5, include="*", exclude=(*exclude, nn.Conv3d)))
    assert unpack(mine)[1].keys() == {"scaled.weight"}
