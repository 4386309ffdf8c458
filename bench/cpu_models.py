"""Networks of `cpu.py`: transformers, and networks with grouped convolutions."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(*(Block(width, width // 64, causal=True) for _ in range(blocks)))


class ViT(nn.Module):
    """A vision transformer of the width of ViT-Tiny."""

    def __init__(self, width: int = 192, blocks: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.positions = nn.Parameter(0.02 * torch.randn(196, width))
        self.blocks = nn.Sequential(*(Block(width, 3, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def conv_norm(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int, hidden: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, hidden, 1), activation(), nn.Conv2d(hidden, channels, 1),
            nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class Bottleneck(nn.Module):
    """1x1, grouped and 1x1 convolution: a block of RegNet, or, with an `inner` width of its own, of EfficientNet."""

    def __init__(
        self, width: tuple[int, int], inner: int, kernel: int, stride: int, groups: int, activation: type[nn.Module]
    ) -> None:
        super().__init__()
        inputs, outputs = width
        self.body = nn.Sequential(
            *conv_norm(inputs, inner), activation(),
            *conv_norm(inner, inner, kernel, stride, groups), activation(),
            Squeeze(inner, max(8, inputs // 4), activation), *conv_norm(inner, outputs),
        )  # fmt: skip
        same = width[0] == width[1] and stride == 1
        self.down = nn.Sequential() if same else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.down(x)


def regnet() -> nn.Module:
    """A network like RegNetY-400MF, with groups of 8 channels."""
    widths = [32, 48, 104, 104, 208, 208, 208, 440, 440]
    blocks = [Bottleneck((a, b), b, 3, 1 if a == b else 2, b // 8, nn.ReLU) for a, b in itertools.pairwise(widths)]
    return with_head(32, blocks, widths[-1], nn.ReLU)


def efficientnet() -> nn.Module:
    """A network like EfficientNet-B0, with depthwise convolutions."""
    widths, kernels = [32, 24, 24, 40, 40, 80, 80, 112, 192], [3, 3, 5, 5, 3, 3, 5, 5]
    blocks = [
        Bottleneck((a, b), 6 * a, kernel, 1 + (b in (40, 80) and a != b), 6 * a, nn.SiLU)
        for a, b, kernel in zip(widths, widths[1:], kernels, strict=False)
    ]
    return with_head(32, blocks, widths[-1], nn.SiLU)


def with_head(stem: int, blocks: list[Bottleneck], width: int, activation: type[nn.Module]) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(*conv_norm(3, stem, 3), activation(), *blocks, activation(), *head)
