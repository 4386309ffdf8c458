from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.deploy import load, write_packed
from equipoise.deploy.blueprint import Blueprint, Network
from equipoise.deploy.export import check_request
from equipoise.deploy.packed_file import read_packed
from equipoise.deploy.two_to_four import (
    SemiConv2d,
    SemiLinear,
    as_matrix,
    convertible,
    is_two_to_four,
    semi_structured,
)
from equipoise.errors import UserError
from equipoise.models.vgg import vgg_c


def two_to_four(weight: Tensor) -> Tensor:
    """Zero two random inputs of every four, one group at a time."""
    weight = weight.detach().clone()
    for output in weight:
        for position in output.reshape(len(output), -1).T:
            for first in range(0, len(position), 4):
                position[first + torch.randperm(4)[:2]] = 0
    return weight


def plain(matrix: Tensor) -> Tensor:
    return matrix


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((1, 1), {}),
        ((1, 1), {"stride": 2}),
        ((3, 3), {"padding": 1}),
        ((3, 2), {"padding": (2, 1), "stride": (2, 3), "dilation": (1, 2)}),
    ],
)
def test_patches_times_the_weight_matrix_are_torchs_convolution(kernel: tuple[int, int], options: dict) -> None:
    layer = nn.Conv2d(8, 4, kernel, **options).double()
    x = torch.randn(3, 8, 9, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    torch.testing.assert_close(SemiConv2d(layer, compress=plain)(x), layer(x))


def test_a_linear_takes_any_leading_dimensions() -> None:
    layer = nn.Linear(8, 4)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(SemiLinear(layer, compress=plain)(x), layer(x))


def test_a_2to4_weight_is_2to4_along_the_rows_of_its_matrix() -> None:
    weight = two_to_four(torch.randn(4, 8, 3, 3))
    assert is_two_to_four(weight)
    assert all((row.reshape(-1, 4) != 0).sum(1).max() <= 2 for row in as_matrix(weight))
    weight[1, 4:7, 2, 0] = 1.0
    assert not is_two_to_four(weight)
    assert not is_two_to_four(torch.zeros(4, 6))  # no groups of four inputs


def test_only_layers_that_torch_can_compress_are_converted() -> None:
    model = nn.Sequential(
        nn.Linear(64, 32), nn.Linear(64, 16), nn.Linear(36, 32), nn.Conv2d(64, 32, 3), nn.Conv2d(64, 32, 3, groups=2),
        nn.Conv2d(64, 32, 3, padding="same"), nn.Linear(64, 64),
    )  # fmt: skip
    with torch.no_grad():
        for layer in list(model)[:-1]:
            layer.weight.zero_()
    assert list(convertible(model)) == ["0", "3"]  # the others: outputs, inputs, groups, padding, weight


def vgg_c_network() -> Network:
    blueprint = Blueprint("vgg_c", {"classes": 10, "channels": 3}, (3, 32, 32), (0.0,) * 3, (1.0,) * 3)
    return Network(blueprint, vgg_c().state_dict())


def test_a_file_names_the_layers_that_run_semi_structured(tmp_path: Path) -> None:
    network = vgg_c_network()
    write_packed(network, tmp_path / "a.safetensors", "bf16", ["features.3"])
    assert read_packed(tmp_path / "a.safetensors").semi_structured == ("features.3",)
    write_packed(network, tmp_path / "b.safetensors", "bf16")
    assert read_packed(tmp_path / "b.safetensors").semi_structured == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_one_line_says_what_is_missing(tmp_path: Path) -> None:
    expected = "2:4 needs an NVIDIA GPU of compute capability 8.0 or later; --format packed runs on a CPU"
    with pytest.raises(UserError, match=expected):
        semi_structured(nn.Linear(64, 64), torch.zeros(1, 64))
    with pytest.raises(UserError, match=expected):
        check_request(tmp_path / "a.safetensors", "2:4")
    write_packed(vgg_c_network(), tmp_path / "a.safetensors", "bf16", ["features.3"])
    with pytest.raises(UserError, match=expected):
        load(tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors", dense=True)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.gpu
def test_a_model_with_semi_structured_weights_computes_the_same_on_a_gpu() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64))
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight.copy_(two_to_four(layer.weight))
    x = torch.randn(32, 64, 4, 4)
    found = semi_structured(model, x)(x.to("cuda", torch.bfloat16))
    torch.testing.assert_close(found.float().cpu(), model(x), rtol=0.05, atol=0.05)
