"""Optimizers by name, as recipes choose them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError
from equipoise.storage.packed_modules import PackedLayer


class SGDW(torch.optim.Optimizer):
    """SGD with momentum and a weight decay of its own that falls with the learning rate.

    w ← w - wd·(lr/lr₀)·w - lr·buf, buf ← μ·buf + g: the decay is not multiplied by lr itself but by how far lr
    has fallen (BSR-Net, Özdenizci & Legenstein 2021).
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 5e-4
    ) -> None:
        if lr <= 0:
            raise UserError(f"lr={lr}: the learning rate is positive")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "first_lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            if live:
                self._step_group(group, live)
        return loss

    def _step_group(self, group: dict[str, Any], live: list[Tensor]) -> None:
        for p in live:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in live]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, [p.grad for p in live if p.grad is not None])
        torch._foreach_mul_(live, 1 - group["weight_decay"] * group["lr"] / group["first_lr"])
        torch._foreach_add_(live, buffers, alpha=-group["lr"])


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """lr: at the start of training. weight_decay. decay_all: decay biases and norms too."""

    lr: float = 0.1
    weight_decay: float = 5e-4
    decay_all: bool = True

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UserError(f"lr={self.lr}: the learning rate is positive")
        if self.weight_decay < 0:
            raise UserError(f"weight_decay={self.weight_decay}: not negative")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name, 0.0) < 1:
                raise UserError(f"{name}={getattr(self, name)}: in [0, 1), such as 0.9")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        raise NotImplementedError

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.decay_all:
            return [{"params": parameters, "weight_decay": self.weight_decay}]
        packed = {id(module.values) for module in model.modules() if isinstance(module, PackedLayer)}
        weights = [p for p in parameters if p.dim() > 1 or id(p) in packed]
        others = [p for p in parameters if p.dim() <= 1 and id(p) not in packed]
        groups = [{"params": weights, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]


@dataclass(frozen=True, kw_only=True)
class SGDOptions(OptimizerOptions):
    """Stochastic gradient descent with momentum; L2 weight decay."""

    momentum: float = 0.9
    nesterov: bool = True

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(self.groups(model), lr=self.lr, momentum=self.momentum, nesterov=nesterov)


@dataclass(frozen=True, kw_only=True)
class SGDWOptions(OptimizerOptions):
    """SGD with momentum and decoupled weight decay that falls with the learning rate (BSR-Net)."""

    momentum: float = 0.9

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return SGDW(self.groups(model), lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class AdamOptions(OptimizerOptions):
    """Adam; L2 weight decay."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.groups(model), lr=self.lr, betas=(self.beta1, self.beta2))


@dataclass(frozen=True, kw_only=True)
class AdamWOptions(AdamOptions):
    """Adam with decoupled weight decay."""

    weight_decay: float = 1e-2

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(model), lr=self.lr, betas=(self.beta1, self.beta2))


OPTIMIZERS: Catalogue[type[OptimizerOptions]] = Catalogue(
    "optimizer", {"sgd": SGDOptions, "sgdw": SGDWOptions, "adam": AdamOptions, "adamw": AdamWOptions}
)
