"""ResNet-18, 34 and 50 with the stem for CIFAR or for ImageNet.

He et al., "Deep residual learning for image recognition", CVPR 2016, with the stride of a bottleneck in
its 3x3 convolution. Parameter names are those of torchvision, so its checkpoints load.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.models import bsr_initialisation as bsr
from equipoise.models.normalize import Normalize
from equipoise.models.options import whole_numbers

Stem = Literal["cifar", "imagenet"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, planes, 3, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _shortcut(inputs, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution beside a shortcut; the last one widens four times."""

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1 = _conv(inputs, planes, 1)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = _conv(planes, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    """Four stages of residual blocks; `blocks` says how many in each, `width` is that of the first stage.

    `bias` is the classifier's: ITOP's ResNets have none. Convolutions start from N(0, 2/fan_out) (He et al.
    2015, as in torchvision); ITOP's code leaves torch's default.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        classes: int = 10,
        channels: int = 3,
        stem: Stem = "cifar",
        width: int = 64,
        bias: bool = True,
    ) -> None:
        super().__init__()
        whole_numbers(classes=classes, channels=channels, width=width)
        if stem not in get_args(Stem):
            raise UserError(f'stem is "{stem}"; it must be "cifar" or "imagenet"')
        large = stem == "imagenet"
        self.normalize = Normalize(channels)
        self.conv1 = _conv(channels, width, 7, stride=2) if large else _conv(channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        grown = block.expansion
        self.layer1 = _stage(block, blocks[0], width, width, stride=1)
        self.layer2 = _stage(block, blocks[1], width * grown, 2 * width, stride=2)
        self.layer3 = _stage(block, blocks[2], 2 * width * grown, 4 * width, stride=2)
        self.layer4 = _stage(block, blocks[3], 4 * width * grown, 8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * grown, classes, bias=bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(self.normalize(x))), inplace=True)
        x = self.layer1(self.maxpool(x))
        x = self.layer4(self.layer3(self.layer2(x)))
        return self.fc(self.avgpool(x).flatten(1))

    def bsr_densities(self, density: float) -> dict[str, float]:
        """BSR-Net's initial densities for a target density p: stem .6, stages .2, p/2, p/2, p/2, last .6."""
        half = bsr.half(density)
        stages = {"layer1": 0.2, "layer2": half, "layer3": half, "layer4": half}
        return bsr.by_stage(self, {"conv1": 0.6, **stages, "fc": 0.6})


def resnet18(
    classes: int = 10, channels: int = 3, stem: Stem = "cifar", width: int = 64, bias: bool = True
) -> ResNet:
    """ResNet-18: 11.2M parameters with the CIFAR stem.

    `stem` is "cifar" (3x3, stride 1) or "imagenet" (7x7, stride 2, max-pool); `width` the channels of the
    first stage; `bias` whether the classifier has one.
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, channels, stem, width, bias)


def resnet34(
    classes: int = 10, channels: int = 3, stem: Stem = "cifar", width: int = 64, bias: bool = True
) -> ResNet:
    """ResNet-34: 21.3M parameters with the CIFAR stem; ITOP's with `bias=False`.

    `stem` is "cifar" (3x3, stride 1) or "imagenet" (7x7, stride 2, max-pool); `width` the channels of the
    first stage; `bias` whether the classifier has one.
    """
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, channels, stem, width, bias)


def resnet50(
    classes: int = 10, channels: int = 3, stem: Stem = "cifar", width: int = 64, bias: bool = True
) -> ResNet:
    """ResNet-50: 25.6M parameters with the ImageNet stem and 1000 classes.

    `stem` is "cifar" (3x3, stride 1) or "imagenet" (7x7, stride 2, max-pool); `width` the channels of the
    first stage; `bias` whether the classifier has one.
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, channels, stem, width, bias)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity where shapes agree, else a 1x1 convolution with BatchNorm."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], count: int, inputs: int, planes: int, stride: int
) -> nn.Sequential:
    """`count` blocks, of which the first changes the resolution and the number of channels."""
    outputs = planes * block.expansion
    later = (block(outputs, planes, stride=1) for _ in range(count - 1))
    return nn.Sequential(block(inputs, planes, stride), *later)
