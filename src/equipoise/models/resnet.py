"""ResNet-18, 34 and 50 with the stem for CIFAR or for ImageNet.

He et al., "Deep residual learning for image recognition", CVPR 2016, with the stride of a bottleneck in
its 3x3 convolution. Parameters are named as in torchvision, so that its checkpoints can be loaded.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.models import bsr_initialisation as bsr
from equipoise.models.normalize import Normalize

Stem = Literal["cifar", "imagenet"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

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
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut; the last convolution has four times the channels."""

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
    """Residual network with four stages.

    Convolutions are initialised from N(0, 2/fan_out) (He et al. 2015, as in torchvision); ITOP's code uses
    torch's default.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        blocks: Number of blocks in each stage.
        classes: Number of classes.
        channels: Number of input channels.
        stem: "cifar" (3x3, stride 1) or "imagenet" (7x7, stride 2, max-pool).
        width: Channels of the first stage.
        bias: Whether the classifier has a bias; ITOP's ResNets have none.
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
        require_whole(classes=classes, channels=channels, width=width)
        if stem not in get_args(Stem):
            raise UserError(f'stem="{stem}" must be "cifar" or "imagenet"')
        large = stem == "imagenet"
        self.normalize = Normalize(channels)
        self.conv1 = _conv(channels, width, 7, stride=2) if large else _conv(channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        expansion = block.expansion
        self.layer1 = _stage(block, blocks[0], width, width, stride=1)
        self.layer2 = _stage(block, blocks[1], width * expansion, 2 * width, stride=2)
        self.layer3 = _stage(block, blocks[2], 2 * width * expansion, 4 * width, stride=2)
        self.layer4 = _stage(block, blocks[3], 4 * width * expansion, 8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * expansion, classes, bias=bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(self.normalize(x))), inplace=True)
        x = self.layer1(self.maxpool(x))
        x = self.layer4(self.layer3(self.layer2(x)))
        return self.fc(self.avgpool(x).flatten(1))

    def bsr_densities(self, density: float) -> dict[str, float]:
        """BSR-Net's initial densities for a target density p: stem 0.6, stages 0.2, p/2, p/2, p/2, classifier 0.6."""
        half = bsr.half(density)
        stages = {"layer1": 0.2, "layer2": half, "layer3": half, "layer4": half}
        return bsr.by_stage(self, {"conv1": 0.6, **stages, "fc": 0.6})


def resnet18(
    classes: int = 10, channels: int = 3, stem: Stem = "cifar", width: int = 64, bias: bool = True
) -> ResNet:
    """ResNet-18: 11.2M parameters with the CIFAR stem.

    The arguments are the same as for `ResNet`.
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, channels, stem, width, bias)


def resnet34(
    classes: int = 10, channels: int = 3, stem: Stem = "cifar", width: int = 64, bias: bool = True
) -> ResNet:
    """ResNet-34: 21.3M parameters with the CIFAR stem; ITOP's with `bias=False`.

    The arguments are the same as for `ResNet`.
    """
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, channels, stem, width, bias)


def resnet50(
    classes: int = 10, channels: int = 3, stem: Stem = "cifar", width: int = 64, bias: bool = True
) -> ResNet:
    """ResNet-50: 25.6M parameters with the ImageNet stem and 1000 classes.

    The arguments are the same as for `ResNet`.
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, channels, stem, width, bias)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity if the shapes agree, otherwise a 1x1 convolution with BatchNorm."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], count: int, inputs: int, planes: int, stride: int
) -> nn.Sequential:
    """`count` blocks; the first one changes the resolution and the number of channels."""
    outputs = planes * block.expansion
    later = (block(outputs, planes, stride=1) for _ in range(count - 1))
    return nn.Sequential(block(inputs, planes, stride), *later)
