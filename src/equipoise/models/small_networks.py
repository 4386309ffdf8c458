"""Networks that train in seconds on a laptop, for the built-in digits, demos and tests."""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.checks import require_whole
from equipoise.models.normalize import Normalize


class Small(nn.Module):
    """Three convolutions and a linear layer; see `small`."""

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 8) -> None:
        super().__init__()
        require_whole(classes=classes, channels=channels)
        require_whole(least=4, size=size)
        self.normalize = Normalize(channels)
        self.features = nn.Sequential(
            *_conv(channels, 32),
            nn.MaxPool2d(2),
            *_conv(32, 64),
            *_conv(64, 128),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(128 * (size // 4) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(self.normalize(x)).flatten(1))


class MLP(nn.Module):
    """Two hidden layers on the flattened image; see `mlp`."""

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 8, hidden: int = 256) -> None:
        super().__init__()
        require_whole(classes=classes, channels=channels, size=size, hidden=hidden)
        self.normalize = Normalize(channels)
        self.layers = nn.Sequential(
            *(nn.Linear(channels * size**2, hidden), nn.ReLU(inplace=True)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.normalize(x).flatten(1))


def small(classes: int = 10, channels: int = 1, size: int = 8) -> Small:
    """Small convolutional net for the 8x8 digits: 98k prunable weights.

    Three 3x3 convolutions without bias (32, 64, 128 channels), each with BatchNorm and ReLU; a max-pool
    after the first and the third; a linear layer. torch's default initialisation.

    Args:
        classes: Number of classes.
        channels: Number of input channels.
        size: Side of the input in pixels.
    """
    return Small(classes, channels, size)


def mlp(classes: int = 10, channels: int = 1, size: int = 8, hidden: int = 256) -> MLP:
    """Perceptron with two hidden layers, for the 8x8 digits: 84k prunable weights.

    Linear layers with bias and ReLU, no normalisation layers. torch's default initialisation.

    Args:
        classes: Number of classes.
        channels: Number of input channels.
        size: Side of the input in pixels.
        hidden: Width of both hidden layers.
    """
    return MLP(classes, channels, size, hidden)


def _conv(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
