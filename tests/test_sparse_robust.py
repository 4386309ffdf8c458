"""Packed and frozen models with input they were not made for, and models that packing must not change."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from equipoise.errors import UserError
from equipoise.sparse import arena, functional, kernels
from equipoise.sparse.frozen import Frozen, freeze
from equipoise.sparse.layout import to_blocked
from equipoise.sparse.modules import BlockedBatchNorm, PackedLayer, packed
from equipoise.sparse.pack import pack, unpack, why_not
from equipoise.topology import SET

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())


def masks(model: nn.Module, density: float = 0.3) -> dict[str, Tensor]:
    """Random masks for all packable layers, applied; the same ones for every model of one shape."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            found[f"{name}.weight"] = torch.rand(layer.weight.shape, generator=generator) < density
            layer.weight.data *= found[f"{name}.weight"]
    return found


def packed_model(model: nn.Module) -> nn.Module:
    return pack(model, masks(model))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(24, 4),
    ).eval()  # fmt: skip


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)).eval()


def sequences() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3)).eval()


class Residual(nn.Module):
    """Two ways that meet, of one shape for images of even height only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide, self.short = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        return F.relu(self.wide(x) + self.short(x))


# -- input of a frozen model


WRONG: list[tuple[Callable[[], nn.Module], tuple[int, ...], str]] = [
    (convolutions, (64,), "4 dimensions"),
    (convolutions, (1, 8), "4 dimensions"),
    (convolutions, (1, 8, 8, 1), "2 to 4 dimensions"),
    (convolutions, (2, 8, 8), "takes 1 channels, the input has 2"),
    (convolutions, (0, 8, 8), "takes 1 channels, the input has 0"),
    (convolutions, (1, 9, 12), "takes 24 channels, the input has 36"),
    (convolutions, (1, 4, 4), "takes 24 channels, the input has 6"),
    (convolutions, (1, 1, 1), "too small"),
    (convolutions, (1, 0, 8), "too small"),
    (sequences, (2, 9), "takes 3 channels, the input has 2"),
    (sequences, (3, 9, 9), "3 dimensions"),
    (sequences, (3, 1), "too small"),
    (linear, (11,), "takes 12 channels, the input has 11"),
    (linear, (3, 13), "takes 12 channels, the input has 13"),
    (linear, (), "2 to 4 dimensions"),
    (Residual, (2, 5, 6), "a residual must have the shape"),
]


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "packed"])
@pytest.mark.parametrize("images", [2, 9, 40])
@pytest.mark.parametrize(("make", "shape", "message"), WRONG)
def test_wrong_shapes_are_refused(
    make: Callable[[], nn.Module], shape: tuple[int, ...], message: str, images: int, frozen: bool
) -> None:
    model = packed_model(make())
    model = freeze(model) if frozen else model
    assert isinstance(model, Frozen) is frozen
    with pytest.raises(UserError, match=message):
        model(torch.rand(images, *shape))
    assert not frozen or not model._programs


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "packed"])
@pytest.mark.parametrize("images", [2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_other_types_than_float32_are_refused(dtype: torch.dtype, images: int, frozen: bool) -> None:
    model = packed_model(convolutions())
    with pytest.raises(UserError, match=r"float32 on cpu, not torch.*\.float\(\)"):
        (freeze(model) if frozen else model)(torch.ones(images, 1, 8, 8, dtype=dtype))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "packed"])
def test_other_devices_are_refused(frozen: bool) -> None:
    model = packed_model(convolutions())
    with pytest.raises(UserError, match="on meta"):
        (freeze(model) if frozen else model)(torch.ones(2, 1, 8, 8, device="meta"))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "packed"])
@pytest.mark.parametrize("images", [2, 9])
def test_a_model_turned_into_another_type_is_refused(images: int, frozen: bool) -> None:
    model = packed_model(convolutions())
    model = (freeze(model) if frozen else model).double()
    with pytest.raises(UserError, match="packed weights are float32"):
        model(torch.rand(images, 1, 8, 8))


@pytest.mark.parametrize("images", [1, 3, 9])
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_a_frozen_linear_model_takes_any_leading_dimensions(shape: tuple[int, ...], images: int) -> None:
    model = linear()
    frozen = freeze(packed_model(model))
    x = torch.rand(images, *shape, 12)
    torch.testing.assert_close(frozen(x), model(x))
    torch.testing.assert_close(frozen(x[:, 0].reshape(-1, 12)), model(x[:, 0].reshape(-1, 12)))


class Defaults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return self.b(self.a(x).relu()) * factor


def test_a_frozen_model_keeps_names_and_defaults_of_its_arguments() -> None:
    model, x = Defaults(), torch.rand(3, 12)
    frozen = freeze(packed_model(model))
    assert isinstance(frozen, Frozen)
    torch.testing.assert_close(frozen(x), model(x))
    torch.testing.assert_close(frozen(x=x, factor=3.0), model(x, 3.0))
    torch.testing.assert_close(frozen(x, 3.0), model(x, 3.0))


@pytest.mark.parametrize("images", [0, 1, 3, 9, 40])
def test_steps_and_gradients_of_the_input_do_not_matter(images: int) -> None:
    model = convolutions()
    frozen = freeze(packed_model(model))
    whole = torch.rand(8, 2 * images, 16, 1)
    inputs = {
        "transposed": whole.permute(1, 3, 0, 2)[::2, :, :, ::2],
        "channels last": whole.permute(1, 3, 0, 2)[:images, :, :, :8].contiguous(memory_format=torch.channels_last),
        "expanded": torch.rand(1, 1, 8, 1).expand(images, 1, 8, 8),
        "flipped": torch.rand(images, 1, 8, 8).flip(3),
        "with gradient": torch.rand(images, 1, 8, 8, requires_grad=True),
    }
    for name, x in inputs.items():
        out = frozen(x)
        assert not out.requires_grad, name
        torch.testing.assert_close(out, model(x).detach(), msg=name)


@pytest.mark.parametrize("make", [convolutions, linear, sequences])
def test_an_empty_batch_stays_empty(make: Callable[[], nn.Module]) -> None:
    model = make()
    mine = packed_model(model)
    x = torch.rand(0, *{convolutions: (1, 8, 8), linear: (12,), sequences: (3, 9)}[make])
    assert mine(x).shape == freeze(mine)(x).shape == model(x).shape


@pytest.mark.parametrize("images", [2, 9])
@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU()], ids=["folded", "alone"])
def test_a_frozen_norm_of_wrong_width_is_refused(between: nn.Module, images: int) -> None:
    model = freeze(packed_model(nn.Sequential(nn.Conv2d(2, 8, 1), between, nn.BatchNorm2d(6))))
    assert isinstance(model, Frozen)
    with pytest.raises(UserError, match="BatchNorm takes 6 channels, the input has 8"):
        model(torch.rand(images, 2, 4, 4))


def test_a_frozen_model_works_after_an_error() -> None:
    model = convolutions()
    frozen, x = freeze(packed_model(model)), torch.rand(3, 1, 8, 8)
    for wrong in (torch.rand(3, 2, 8, 8), torch.rand(3, 64), x.double()):
        with pytest.raises(UserError):
            frozen(wrong)
    torch.testing.assert_close(frozen(x), model(x))


# -- blocked activations of a packed model


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


def test_pooling_is_along_the_axes_of_torch_or_refused() -> None:
    x = to_blocked(torch.rand(2, 3, 8))
    for wrong in (functional.max_pool, functional.avg_pool):
        with pytest.raises(UserError, match="4 dimensions"):
            wrong(x)
    with pytest.raises(UserError, match="too small"):
        functional.max_pool(to_blocked(torch.rand(2, 3, 1, 8)))
    with pytest.raises(UserError, match="too small"):
        functional.avg_pool(to_blocked(torch.rand(2, 3, 8, 2)), (3, 3))


def test_a_residual_of_other_images_is_refused() -> None:
    with pytest.raises(UserError, match="residual"):
        functional.add(to_blocked(torch.rand(2, 3, 4, 4)), to_blocked(torch.rand(3, 3, 4, 4)))


# -- tracing


class Small(nn.Module):
    """A convolution, what the subclass does, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(0.0))
        self.plain = torch.tensor(3.0)
        self.steps, self.seen = 0, None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.norm(self.conv(x)).relu()).mean((2, 3)))

    def between(self, x: Any) -> Any:
        return x


class FunctionalDropout(Small):
    def between(self, x: Any) -> Any:
        return F.dropout(x, 0.5, self.training)


class TrainBranch(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if self.training else x


class NormBranch(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if self.norm.training else x


class Attention(Small):
    def between(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)


class TorchDepth(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if torch.rand(()).item() < 0.5 else x


class PythonDepth(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if random.random() < 0.5 else x


class NumpyDepth(Small):
    def between(self, x: Any) -> Any:
        return x * 2 if np.random.rand() < 0.5 else x  # noqa: NPY002


class ReadsWeight(Small):
    def between(self, x: Any) -> Any:
        return x * self.conv.weight.abs().sum()


class MakesTensor(Small):
    def between(self, x: Any) -> Any:
        return x * (self.scale * 2)


class Counts(Small):
    def between(self, x: Any) -> Any:
        self.steps += 1
        return x * 2 if self.steps > 1 else x


class CountsInBuffer(Small):
    def between(self, x: Any) -> Any:
        self.count.add_(1)  # type: ignore[operator]
        return x * self.count


class Remembers(Small):
    def between(self, x: Any) -> Any:
        self.seen = x
        return x


UNFAITHFUL: list[type[Small]] = [
    FunctionalDropout, TrainBranch, NormBranch, Attention, TorchDepth, PythonDepth, NumpyDepth, ReadsWeight,
    MakesTensor, Counts, CountsInBuffer, Remembers,
]  # fmt: skip


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


@pytest.mark.parametrize("packed_in_training", [True, False])
@pytest.mark.parametrize("kind", UNFAITHFUL)
def test_what_a_forward_decides_in_python_is_decided_at_every_call(
    kind: type[Small], packed_in_training: bool
) -> None:
    seed()
    model, x = kind().train(packed_in_training), torch.rand(6, 2, 6, 6)
    mine = packed_model(model)
    assert not isinstance(mine, fx.GraphModule)
    for training in (True, False, True):
        for _ in range(3):
            seed()
            wanted = model.train(training)(x)
            seed()
            torch.testing.assert_close(mine.train(training)(x), wanted)
    assert unpack(mine)[0].keys() == model.state_dict().keys()


class UsesPlain(Small):
    def between(self, x: Any) -> Any:
        return x * self.plain + self.scale


@pytest.mark.parametrize("kind", [Small, UsesPlain])
def test_what_can_be_traced_is(kind: type[Small]) -> None:
    model, x = kind(), torch.rand(6, 2, 6, 6)
    mine = packed_model(model)
    assert isinstance(mine, fx.GraphModule)
    assert unpack(mine)[0].keys() == model.state_dict().keys()
    torch.testing.assert_close(mine(x), model(x))
    torch.testing.assert_close(freeze(mine)(x), model.eval()(x))


@pytest.mark.parametrize("kind", [Small, *UNFAITHFUL])
def test_packing_draws_no_random_numbers(kind: type[Small]) -> None:
    model = kind()
    found = masks(model)
    seed()
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()  # noqa: NPY002
    seed()
    pack(model, found)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted  # noqa: NPY002


@pytest.mark.parametrize("kind", [Small, FunctionalDropout])
@pytest.mark.parametrize("training", [True, False])
def test_each_module_keeps_its_own_mode(kind: type[Small], training: bool) -> None:
    model = kind().train(training)
    model.norm.train(not training)
    mine = packed_model(model)
    assert {name: module.training for name, module in mine.named_modules() if name} == {
        "conv": training, "norm": not training, "head": training
    }  # fmt: skip
    assert mine.training is training
    assert {name: module.training for name, module in model.named_modules() if name}["norm"] is not training


@pytest.mark.parametrize("kind", [FunctionalDropout, TrainBranch, NormBranch])
def test_freezing_has_one_mode_and_needs_no_other(kind: type[Small]) -> None:
    model, x = kind(), torch.rand(9, 2, 6, 6)
    frozen = freeze(packed_model(model.train()))
    torch.testing.assert_close(frozen(x), model.eval()(x))
    assert isinstance(freeze(packed_model(Sequence())), Frozen)


class Sequence(nn.Module):
    """Dropout before packed layers that follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(F.dropout(x, 0.5, self.training)).relu())


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


# -- memory


def test_half_made_loans_are_dropped_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    loan = arena._Loan.__new__(arena._Loan)
    del loan
    gc.collect()
    assert not seen


# -- padding by name, and what has no packed form


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
def test_a_refusal_names_the_type_and_the_way_out(layer: nn.Module, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer))
    with pytest.raises(UserError, match=rf'"1.weight" of a {kind}:.*exclude=\("1",\).*masked storage'):
        pack(model, {"1.weight": torch.ones_like(model.get_parameter("1.weight")).bool()})
    assert kind in str(why_not(model, SET(sparsity=0.5)))
    assert isinstance(pack(model, SET(sparsity=0.5, exclude=("1",))).get_submodule("0"), PackedLayer)
