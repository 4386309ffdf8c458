"""Models: sizes, feature maps and densities of the papers, and properties of every model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise import models
from equipoise.errors import UserError
from equipoise.models import MODELS, Normalize, WideResNet
from equipoise.models.resnet import BasicBlock, Bottleneck
from equipoise.models.wide_resnet import WideBlock

NAMES = ["small", "mlp", "vgg16", "vgg_c", "resnet18", "resnet34", "resnet50", "wrn_28_4"]
NARROW: dict[str, dict[str, Any]] = {name: {"width": 8} for name in ("resnet18", "resnet34", "resnet50")}
SIDES = {"small": 8, "mlp": 8}


def parameters(model: nn.Module) -> int:
    """Number of learned values."""
    return sum(p.numel() for p in model.parameters())


def prunable(model: nn.Module) -> dict[str, int]:
    """Sizes of the weights of convolutions and linear layers: tensors with at least two axes."""
    return {name: p.numel() for name, p in model.named_parameters() if p.ndim >= 2}


def small_instance(name: str) -> tuple[Any, Tensor]:
    """A model (ResNets are narrow, for speed) and a batch for it."""
    torch.manual_seed(0)
    model = MODELS[name](**NARROW.get(name, {}))
    side = SIDES.get(name, 32)
    return model, torch.rand(2, 1 if name in SIDES else 3, side, side)


def randomise_norms(module: nn.Module) -> None:
    """Give BatchNorm layers random statistics and affine weights, so that they are not the identity."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d | nn.BatchNorm1d):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)


# Sizes


@pytest.fixture
def shapes_only() -> Iterator[None]:
    """Make models on the meta device: their weights have shapes and no values."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("shapes_only")
def test_vgg_c_has_11_323_466_parameters_of_all_kinds_and_16_prunable_tensors() -> None:
    """The papers count all parameters, biases and BatchNorm included; 11,307,712 are prunable."""
    model = models.vgg_c()
    assert parameters(model) == 11_323_466
    assert len(prunable(model)) == 16
    assert sum(prunable(model).values()) == 11_307_712


@pytest.mark.usefixtures("shapes_only")
def test_bsr_models_have_the_prunable_weights_of_the_paper() -> None:
    """These papers count the weights of convolutions and linear layers only."""
    assert len(prunable(models.vgg16())) == 16
    assert sum(prunable(models.vgg16()).values()) == 15_302_848
    assert sum(prunable(models.wrn_28_4()).values()) == 5_841_840


@pytest.mark.usefixtures("shapes_only")
def test_resnet34_of_itop_has_21_282_112_parameters_of_all_kinds() -> None:
    """ITOP's classifier has no bias; with it there are the usual 21,282,122."""
    assert parameters(models.resnet34(bias=False)) == 21_282_112
    assert parameters(models.resnet34()) == 21_282_122


@pytest.mark.usefixtures("shapes_only")
@pytest.mark.parametrize(
    ("factory", "count"),
    [(models.resnet18, 11_689_512), (models.resnet34, 21_797_672), (models.resnet50, 25_557_032)],
)
def test_imagenet_resnets_have_the_well_known_counts(factory: Callable[..., nn.Module], count: int) -> None:
    assert parameters(factory(classes=1000, stem="imagenet")) == count


@pytest.mark.parametrize("name", ["small", "mlp"])
def test_small_models_are_small(name: str) -> None:
    assert 50_000 <= sum(prunable(MODELS[name]()).values()) <= 150_000


# Shapes


@pytest.mark.parametrize("name", NAMES)
def test_logits_on_cifar_sized_images(name: str) -> None:
    options = {"size": 32, **NARROW.get(name, {})} if name in SIDES else NARROW.get(name, {})
    model = MODELS[name](classes=7, channels=3, **options)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", NAMES)
def test_other_numbers_of_channels(name: str) -> None:
    model = MODELS[name](channels=2, **NARROW.get(name, {}))
    side = SIDES.get(name, 32)
    assert model(torch.rand(2, 2, side, side)).shape == (2, 10)


def test_resnet50_with_imagenet_stem() -> None:
    model = models.resnet50(classes=1000, stem="imagenet", width=16)
    sides: list[int] = []
    for stage in (model.conv1, model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda _module, _inputs, out: sides.append(out.shape[-1]))
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 1000)
    assert sides == [32, 16, 8, 4, 2]


def test_vgg_c_widens_its_maps_at_the_1x1_convolutions() -> None:
    x, sides = torch.rand(1, 3, 32, 32), [32]
    for layer in models.vgg_c().eval().features:
        x = layer(x)
        if x.shape[-1] != sides[-1]:
            sides.append(x.shape[-1])
    assert sides == [32, 16, 8, 10, 5, 7, 3, 5, 2]


@pytest.mark.parametrize("name", ["vgg16", "vgg_c", "small", "mlp"])
@settings(max_examples=8, deadline=None)
@given(size=st.integers(16, 70))
def test_any_input_size(name: str, size: int) -> None:
    with torch.device("meta"):
        model = MODELS[name](channels=1, size=size)
        assert model(torch.empty(2, 1, size, size)).shape == (2, 10)


# Structure


def test_vgg_c_classifier_normalises_after_relu() -> None:
    kinds = [type(layer).__name__ for layer in models.vgg_c().classifier]
    assert kinds == ["Linear", "ReLU", "BatchNorm1d", "Linear", "ReLU", "BatchNorm1d", "Linear"]


def test_no_model_has_dropout() -> None:
    for name in NAMES:
        model, _ = small_instance(name)
        assert not any("dropout" in type(module).__name__.lower() for module in model.modules())


def norm_relu(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return F.relu(norm(x))


@pytest.mark.parametrize(("inputs", "stride"), [(6, 1), (4, 2)])
def test_wide_block_against_its_definition(inputs: int, stride: int) -> None:
    """Zagoruyko and Komodakis: x + conv(relu(bn(conv(relu(bn(x)))))), or the 1x1 conv of relu(bn(x))."""
    torch.manual_seed(0)
    block = WideBlock(inputs, 6, stride).eval()
    randomise_norms(block)
    x = torch.randn(2, inputs, 8, 8)
    before = x.clone()
    active = norm_relu(x, block.bn1)
    residual = F.conv2d(active, block.conv1.weight, stride=stride, padding=1)
    residual = F.conv2d(norm_relu(residual, block.bn2), block.conv2.weight, padding=1)
    shortcut = x if block.shortcut is None else F.conv2d(active, block.shortcut.weight, stride=stride)
    torch.testing.assert_close(block(x), shortcut + residual)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("inputs", "stride"), [(6, 1), (4, 2), (4, 1)])
def test_basic_block_against_its_definition(inputs: int, stride: int) -> None:
    torch.manual_seed(0)
    block = BasicBlock(inputs, 6, stride).eval()
    randomise_norms(block)
    x = torch.randn(2, inputs, 8, 8)
    before = x.clone()
    residual = norm_relu(F.conv2d(x, block.conv1.weight, stride=stride, padding=1), block.bn1)
    residual = block.bn2(F.conv2d(residual, block.conv2.weight, padding=1))
    shortcut = x
    if isinstance(block.downsample, nn.Sequential):
        conv, norm = block.downsample
        shortcut = norm(F.conv2d(x, conv.weight, stride=stride))  # type: ignore[arg-type]
    torch.testing.assert_close(block(x), F.relu(shortcut + residual))
    assert torch.equal(x, before)
    assert isinstance(block.downsample, nn.Identity) == (inputs == 6)


def test_bottleneck_strides_in_its_3x3_convolution() -> None:
    torch.manual_seed(0)
    block = Bottleneck(4, 6, stride=2).eval()
    randomise_norms(block)
    x = torch.randn(2, 4, 8, 8)
    residual = norm_relu(F.conv2d(x, block.conv1.weight), block.bn1)
    residual = norm_relu(F.conv2d(residual, block.conv2.weight, stride=2, padding=1), block.bn2)
    residual = block.bn3(F.conv2d(residual, block.conv3.weight))
    assert isinstance(block.downsample, nn.Sequential)
    conv, norm = block.downsample
    shortcut = norm(F.conv2d(x, conv.weight, stride=2))  # type: ignore[arg-type]
    torch.testing.assert_close(block(x), F.relu(shortcut + residual))


def test_resnet_parameter_names_are_torchvisions() -> None:
    keys = models.resnet50(stem="imagenet", width=8).state_dict().keys()
    assert len(keys) == 320
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight", "layer1.0.downsample.1.bias"} < keys
    assert {"layer4.2.conv3.weight", "layer4.2.bn3.num_batches_tracked", "fc.weight", "fc.bias"} < keys


def test_wide_resnet_of_another_shape() -> None:
    """WRN-16-2 with 10 classes: the 0.69M parameters that public implementations report."""
    assert parameters(WideResNet(16, 2)) == 691_674


# Initialisation


@pytest.mark.parametrize("name", ["vgg16", "wrn_28_4"])
def test_bsr_models_start_with_he_variance(name: str) -> None:
    torch.manual_seed(0)
    for layer in MODELS[name]().modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            expected = math.sqrt(2 / layer.weight[0].numel())
            assert layer.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(layer.weight.numel()))
            assert layer.bias is None or not layer.bias.any()


def test_resnets_start_with_he_variance_of_the_outputs() -> None:
    torch.manual_seed(0)
    for layer in models.resnet18().modules():
        if isinstance(layer, nn.Conv2d):
            expected = math.sqrt(2 / layer.weight[:, 0].numel())
            assert layer.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(layer.weight.numel()))


# BSR-Net's densities


@pytest.mark.parametrize("name", ["vgg16", "wrn_28_4", "resnet18", "resnet34", "resnet50"])
@settings(max_examples=5, deadline=None)
@given(density=st.floats(0.001, 1.0))
def test_bsr_densities_cover_every_prunable_weight(name: str, density: float) -> None:
    with torch.device("meta"):
        model, _ = small_instance(name)
    densities = model.bsr_densities(density)
    assert list(densities) == list(prunable(model))
    assert all(0 < value <= 1 for value in densities.values())


def test_bsr_densities_of_vgg16_go_by_layer() -> None:
    densities = list(models.vgg16().bsr_densities(0.1).values())
    assert densities == [0.6, 0.6, 0.2, 0.2] + 11 * [0.05] + [0.6]


def test_bsr_densities_of_wrn_go_by_stage() -> None:
    """A stage of WRN-28 has 4 blocks of 2 convolutions and, in the first block, one for the shortcut."""
    densities = list(models.wrn_28_4().bsr_densities(0.1).values())
    assert densities == [0.6] + 9 * [0.1] + 18 * [0.05] + [0.6]


def test_bsr_densities_of_resnet_go_by_stage() -> None:
    """ResNet-18's first stage has 4 convolutions, the others 5 with their shortcut."""
    densities = list(models.resnet18(width=8).bsr_densities(0.1).values())
    assert densities == [0.6] + 4 * [0.2] + 15 * [0.05] + [0.6]


@pytest.mark.parametrize("density", [0.0, -0.1, 1.2, math.nan])
def test_bsr_densities_refuse_an_impossible_target(density: float) -> None:
    with pytest.raises(UserError, match="above 0 and at most 1"):
        models.vgg16().bsr_densities(density)


# All models


def test_catalogue_has_every_model_with_a_line_of_description() -> None:
    assert list(MODELS) == NAMES
    assert all(len(line) > 10 for line in MODELS.describe().values())
    for name in NAMES:
        assert getattr(models, name) is MODELS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name: str) -> None:
    model, x = small_instance(name)
    F.cross_entropy(model(x), torch.tensor([1, 2])).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key


@pytest.mark.parametrize("name", NAMES)
def test_traceable_and_the_trace_follows_normalize(name: str) -> None:
    model, x = small_instance(name)
    traced = torch.fx.symbolic_trace(model.eval())
    torch.testing.assert_close(traced(x), model(x))
    before = traced(x)
    channels = x.shape[1]
    model.normalize.set([0.4] * channels, [0.2] * channels)
    torch.testing.assert_close(traced(x), model(x))
    assert not torch.allclose(traced(x), before)


@pytest.mark.parametrize("name", NAMES)
def test_normalising_inside_equals_normalising_outside(name: str) -> None:
    inside, x = small_instance(name)
    outside = copy.deepcopy(inside)
    mean, std = torch.linspace(0.3, 0.5, x.shape[1]), torch.linspace(0.2, 0.3, x.shape[1])
    inside.normalize.set(mean, std.tolist())
    x64 = x.double().numpy()
    normalised = (x64 - mean.double().numpy()[:, None, None]) / std.double().numpy()[:, None, None]
    torch.testing.assert_close(inside(x), outside(torch.from_numpy(normalised).float()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_normalize_is_not_in_the_state_dict(name: str) -> None:
    model, _ = small_instance(name)
    assert isinstance(model.normalize, Normalize)
    assert not any("normalize" in key for key in model.state_dict())
    assert not any("normalize" in key for key, _ in model.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_no_device_and_no_dtype_are_hard_coded(name: str) -> None:
    model, x = small_instance(name)
    assert model.double()(x.double()).dtype == torch.float64
    assert model.to("meta")(x.double().to("meta")).device.type == "meta"


# Normalize


def test_normalize_starts_as_the_identity() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(Normalize()(x), x)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.5], [0.5, 0.5, 0.5], "mean has 1 numbers; .* 3 channels"),
        ([0.5, 0.5, 0.5], [0.5, 0.5], "std has 2 numbers; .* 3 channels"),
        ([0.5, 0.5, 0.5], [0.5, 0.0, 0.5], "std=.* above 0"),
        ([0.5, math.nan, 0.5], [0.5, 0.5, 0.5], "mean=.* finite"),
    ],
)
def test_normalize_refuses_wrong_statistics(mean: list[float], std: list[float], message: str) -> None:
    normalize = Normalize(3)
    with pytest.raises(UserError, match=message):
        normalize.set(mean, std)
    assert not normalize.mean.any(), "a refused setting must change nothing"


# Errors


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"stem": "mnist"}, 'stem="mnist" must be "cifar" or "imagenet"'),
        ("resnet50", {"width": 0}, "width=0"),
        ("resnet34", {"classes": 2.5}, "classes=2.5"),
        ("wrn_28_4", {"channels": True}, "channels=True"),
        ("vgg16", {"size": 15}, "size=15 is too small"),
        ("vgg_c", {"size": 3}, "size=3 is too small"),
        ("vgg_c", {"classes": 0}, "classes=0"),
        ("small", {"size": 3}, "size=3 .* at least 4"),
        ("mlp", {"hidden": -1}, "hidden=-1"),
    ],
)
def test_wrong_options_are_explained(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MODELS[name](**options)


@pytest.mark.parametrize("depth", [4, 12, 27])
def test_wide_resnet_refuses_an_impossible_depth(depth: int) -> None:
    with pytest.raises(UserError, match=f"depth={depth} .* 6n \\+ 4"):
        WideResNet(depth, 2)


def test_an_unknown_model_is_explained() -> None:
    with pytest.raises(UserError, match='did you mean "vgg_c"'):
        MODELS["vgg-c"]
