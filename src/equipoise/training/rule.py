"""The optimizers' formulas on one vector of all weights, with the learning rate as a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.training.optimizers import SGDW


class Rule:
    """One step of an optimizer, for one of its groups.

    `states` names what it remembers per weight. `numbers` are those that change from step to step, given the group
    and how many steps were taken before; everything else is fixed when a rule is made.
    """

    states: tuple[str, ...] = ()
    count = 1  # of numbers

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self.decay = group["weight_decay"]

    def numbers(self, steps: int) -> list[float]:
        return [self.group["lr"]]

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """The new weights; states are changed in place."""
        raise NotImplementedError


class SGDRule(Rule):
    """torch.optim.SGD."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.momentum, self.nesterov = group["momentum"], group["nesterov"]
        self.states = ("momentum_buffer",) if self.momentum else ()

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        if self.decay:
            g = g + self.decay * w
        for buffer in states:
            new = self.momentum * buffer + g
            buffer.copy_(new)
            g = g + self.momentum * new if self.nesterov else new
        return w - numbers[0] * g


class SGDWRule(Rule):
    """equipoise's SGDW."""

    states = ("momentum_buffer",)
    count = 2

    def numbers(self, steps: int) -> list[float]:
        lr = self.group["lr"]
        return [lr, 1 - self.decay * lr / self.group["first_lr"]]

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        new = self.group["momentum"] * states[0] + g
        states[0].copy_(new)
        return w * numbers[1] - numbers[0] * new


class AdamRule(Rule):
    """torch.optim.Adam, and AdamW where the decay is decoupled."""

    states = ("exp_avg", "exp_avg_sq")
    count = 3
    decoupled = False

    def numbers(self, steps: int) -> list[float]:
        first, second = (1 - beta ** (steps + 1) for beta in self.group["betas"])
        return [self.group["lr"] / first, math.sqrt(second), 1 - self.group["lr"] * self.decay]

    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], numbers: Tensor) -> Tensor:
        if self.decoupled:
            w = w * numbers[2]
        elif self.decay:
            g = g + self.decay * w
        (first, second), (beta1, beta2) = states, self.group["betas"]
        mean, square = first.lerp(g, 1 - beta1), beta2 * second + (1 - beta2) * g * g
        first.copy_(mean)
        second.copy_(square)
        return w - numbers[0] * mean / (square.sqrt() / numbers[1] + self.group["eps"])


class AdamWRule(AdamRule):
    """torch.optim.AdamW."""

    decoupled = True


RULES: dict[type[torch.optim.Optimizer], type[Rule]] = {
    torch.optim.SGD: SGDRule,
    SGDW: SGDWRule,
    torch.optim.Adam: AdamRule,
    torch.optim.AdamW: AdamWRule,
}
