"""VGG-16 of BSR-Net and VGG-C of ITOP, for images of CIFAR's size.

Configurations D and C of Simonyan and Zisserman, "Very deep convolutional networks for large-scale image
recognition", ICLR 2015. They differ in the kernel of the last convolution of the three deeper blocks.
"""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.models import bsr_initialisation as bsr
from equipoise.models.normalize import Normalize

WIDTHS = (64, 128, 256, 512, 512)
Kernels = tuple[tuple[int, ...], ...]
"""Kernel size of every convolution, block by block."""
C: Kernels = ((3, 3), (3, 3), (3, 3, 1), (3, 3, 1), (3, 3, 1))
D: Kernels = ((3, 3), (3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))


class VGG(nn.Module):
    """Convolutions, followed by a perceptron on the flattened feature maps."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential, channels: int) -> None:
        super().__init__()
        self.normalize = Normalize(channels)
        self.features = features
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(self.normalize(x)).flatten(1))


class VGG16(VGG):
    """VGG-16 of BSR-Net; see `vgg16`."""

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        require_whole(classes=classes, channels=channels, size=size)
        inputs = WIDTHS[-1] * _side(D, pools=4, size=size) ** 2
        classifier = nn.Sequential(
            nn.Linear(inputs, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, classes),
        )
        super().__init__(_features(D, pools=4, channels=channels, bias=False), classifier, channels)
        bsr.he_initialise(self)

    def bsr_densities(self, density: float) -> dict[str, float]:
        """BSR-Net's initial densities for a target density p: 0.6, 0.6, 0.2, 0.2, then p/2, the last 0.6."""
        names = [f"{name}.weight" for name in bsr.weighted_layers(self)]
        rest = [bsr.half(density)] * (len(names) - 5)
        return dict(zip(names, [0.6, 0.6, 0.2, 0.2, *rest, 0.6], strict=True))


class VGGC(VGG):
    """VGG-C of ITOP; see `vgg_c`."""

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        require_whole(classes=classes, channels=channels, size=size)
        inputs = WIDTHS[-1] * _side(C, pools=5, size=size) ** 2
        # BatchNorm after ReLU replaces the dropout of the original.
        classifier = nn.Sequential(
            *(nn.Linear(inputs, 512), nn.ReLU(inplace=True), nn.BatchNorm1d(512)),
            *(nn.Linear(512, 512), nn.ReLU(inplace=True), nn.BatchNorm1d(512)),
            nn.Linear(512, classes),
        )
        super().__init__(_features(C, pools=5, channels=channels, bias=True), classifier, channels)


def vgg16(classes: int = 10, channels: int = 3, size: int = 32) -> VGG16:
    """VGG-16 for 32x32 images, as in BSR-Net: 15.3M prunable weights.

    13 3x3 convolutions without bias, each with BatchNorm and ReLU; a max-pool after the first four blocks;
    2048-256-256-classes with bias and ReLU; no dropout. He initialisation.

    Args:
        classes: Number of classes.
        channels: Number of input channels.
        size: Side of the input in pixels.
    """
    return VGG16(classes, channels, size)


def vgg_c(classes: int = 10, channels: int = 3, size: int = 32) -> VGGC:
    """VGG-C for 32x32 images, as in ITOP and SNIP: 11.3M parameters.

    13 convolutions with bias, each with BatchNorm and ReLU; a max-pool after each of the five blocks;
    2048-512-512-classes. The 1x1 convolutions have the padding of 1 of the 3x3 ones, so their feature maps
    grow. torch's default initialisation, as in ITOP's code.

    Args:
        classes: Number of classes.
        channels: Number of input channels.
        size: Side of the input in pixels.
    """
    return VGGC(classes, channels, size)


def _features(kernels: Kernels, pools: int, channels: int, bias: bool) -> nn.Sequential:
    """The convolutional blocks; each of the first `pools` blocks is followed by a max-pool."""
    layers: list[nn.Module] = []
    for block, (width, block_kernels) in enumerate(zip(WIDTHS, kernels, strict=True)):
        for kernel in block_kernels:
            conv = nn.Conv2d(channels, width, kernel, padding=1, bias=bias)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        if block < pools:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _side(kernels: Kernels, pools: int, size: int) -> int:
    """Side of the last feature map for an input of side `size`."""
    side = size
    for block, block_kernels in enumerate(kernels):
        side += sum(3 - kernel for kernel in block_kernels)
        side = side // 2 if block < pools else side
        if side == 0:
            raise UserError(f"size={size} is too small for this network's max-pools; CIFAR has 32")
    return side
