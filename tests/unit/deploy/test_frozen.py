"""Frozen models: inputs of every kind, and inputs that packed and frozen models refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.deploy.frozen import freeze, is_frozen
from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.topology.packing import pack
from sparse_helpers import convolutions, linear, packed_model, sequences

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Residual(nn.Module):
    """Two branches of one shape for images of even height only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide, self.short = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        return F.relu(self.wide(x) + self.short(x))


WRONG: list[tuple[Callable[[], nn.Module], tuple[int, ...], str]] = [
    (convolutions, (64,), "4 dimensions"),
    (convolutions, (1, 8), "4 dimensions"),
    (convolutions, (1, 8, 8, 1), "4 dimensions"),
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
    (linear, (), "takes 12 channels, the input has"),
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
    assert is_frozen(model) is frozen
    with pytest.raises(UserError, match=message):
        model(torch.rand(images, *shape))


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
    assert is_frozen(frozen)
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
    assert is_frozen(model)
    with pytest.raises(UserError, match="BatchNorm takes 6 channels, the input has 8"):
        model(torch.rand(images, 2, 4, 4))


def test_a_frozen_model_works_after_an_error() -> None:
    model = convolutions()
    frozen, x = freeze(packed_model(model)), torch.rand(3, 1, 8, 8)
    for wrong in (torch.rand(3, 2, 8, 8), torch.rand(3, 64), x.double()):
        with pytest.raises(UserError):
            frozen(wrong)
    torch.testing.assert_close(frozen(x), model(x))


@pytest.mark.parametrize("images", [1, 7, 16, 17, 40, 130])
def test_a_frozen_model_keeps_the_precision_of_the_packed_one(images: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(400, 10),
    ).eval()  # fmt: skip
    masks = {f"{name}.weight": torch.rand_like(model[int(name)].weight) < 0.1 for name in "047"}
    for name, mask in masks.items():
        model.get_parameter(name).data *= mask
    nets = {precision: freeze(pack(model, masks, precision=precision)) for precision in ("float32", "bf16")}
    assert all(map(is_frozen, nets.values()))
    x = torch.rand(images, 3, 11, 10)
    wanted = copy.deepcopy(model).double()(x.double())
    found = {precision: copy.deepcopy(net)(x) for precision, net in nets.items()}
    assert torch.allclose(found["float32"].double(), wanted, 1e-4, 1e-5)
    assert torch.allclose(found["bf16"].double(), wanted, 0.02, 0.02 * float(wanted.detach().abs().max()))
    assert found["bf16"].dtype is torch.float32
    assert torch.equal(found["bf16"], found["float32"]) == (images <= 16)
