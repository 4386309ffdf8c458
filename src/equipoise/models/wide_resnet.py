"""Wide residual networks, such as the WRN-28-4 of BSR-Net.

Zagoruyko and Komodakis, "Wide residual networks", BMVC 2016.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.models import bsr_initialisation as bsr
from equipoise.models.normalize import Normalize


class WideBlock(nn.Module):
    """BatchNorm and ReLU before each of two 3x3 convolutions.

    If the number of channels changes, the shortcut is a 1x1 convolution of the activated input, without BatchNorm.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x), inplace=True)
        out = F.relu(self.bn2(self.conv1(active)), inplace=True)
        return self.conv2(out) + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN-depth-width: three stages of pre-activation blocks, without dropout.

    The stages have 16, 32 and 64 times `width` channels and are followed by global average pooling and a
    linear layer with bias. He initialisation, as in BSR-Net.

    Args:
        depth: 6n + 4 for n blocks per stage.
        width: Widening factor.
        classes: Number of classes.
        channels: Number of input channels.
    """

    def __init__(self, depth: int, width: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        require_whole(depth=depth, width=width, classes=classes, channels=channels)
        count, remainder = divmod(depth - 4, 6)
        if remainder or count < 1:
            raise UserError(f"depth={depth} must be 10, 16, 22, 28 or another 6n + 4")
        self.normalize = Normalize(channels)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.stage1 = _stage(count, 16, 16 * width, stride=1)
        self.stage2 = _stage(count, 16 * width, 32 * width, stride=2)
        self.stage3 = _stage(count, 32 * width, 64 * width, stride=2)
        self.bn = nn.BatchNorm2d(64 * width)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64 * width, classes)
        bsr.he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.conv1(self.normalize(x)))))
        x = F.relu(self.bn(x), inplace=True)
        return self.fc(self.avgpool(x).flatten(1))

    def bsr_densities(self, density: float) -> dict[str, float]:
        """BSR-Net's initial densities for a target density p: stem 0.6, stages 0.1, p/2, p/2, classifier 0.6."""
        half = bsr.half(density)
        stages = {"stage1": 0.1, "stage2": half, "stage3": half}
        return bsr.by_stage(self, {"conv1": 0.6, **stages, "fc": 0.6})


def wrn_28_4(classes: int = 10, channels: int = 3) -> WideResNet:
    """WRN-28-4, as in BSR-Net: 5.8M prunable weights.

    Pre-activation blocks without dropout, 1x1 shortcuts without BatchNorm, He initialisation.

    Args:
        classes: Number of classes.
        channels: Number of input channels.
    """
    return WideResNet(28, 4, classes, channels)


def _stage(count: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """`count` blocks; the first one changes the resolution and the number of channels."""
    later = (WideBlock(outputs, outputs, stride=1) for _ in range(count - 1))
    return nn.Sequential(WideBlock(inputs, outputs, stride), *later)
