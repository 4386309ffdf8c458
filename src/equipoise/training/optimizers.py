"""Optimizers by name, as recipes choose them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError
from equipoise.storage.masked import Compile
from equipoise.storage.packed_modules import PackedLayer

Groups = list[dict[str, Any]]


class SGDW(Optimizer):
    """SGD with momentum and a decoupled weight decay that falls with the learning rate (BSR-Net).

    buf ← μ·buf + g;  w ← w·(1 - wd·lr/lr₀) - lr·buf. The decay is not multiplied by lr itself but by how far lr has
    fallen (Özdenizci & Legenstein 2021).

    Args:
        params: Parameters or groups.
        lr: Learning rate at the start of training, lr₀; a tensor can be changed between replays of a CUDA graph.
        momentum: μ.
        weight_decay: wd.
        compile: Applied to the function that steps a parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        compile: Compile = lambda function: function,
    ) -> None:
        if lr <= 0:
            raise UserError(f"lr={lr}: the learning rate is positive")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "first_lr": float(lr)}
        super().__init__(params, defaults)
        self._function = compile(sgdw_step)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad)
        return loss

    def _step(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        decay = group["weight_decay"] / group["first_lr"]
        self._function(parameter.detach(), gradient, state["momentum_buffer"], group["lr"], group["momentum"], decay)


def sgdw_step(
    weight: Tensor, gradient: Tensor, buffer: Tensor, lr: float | Tensor, momentum: float, decay: float
) -> None:
    """One step of SGDW, in place; `decay` is wd/lr₀."""
    buffer.mul_(momentum).add_(gradient)
    weight.mul_(1 - lr * decay)
    if isinstance(lr, Tensor):
        weight.addcmul_(buffer, lr, value=-1)
    else:
        weight.add_(buffer, alpha=-lr)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of all groups; on a device only if it has changed."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = value
        elif group.get("lr_on_device") != value:
            group["lr"].fill_(value)
            group["lr_on_device"] = value


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options that all optimizers share.

    Args:
        lr: Learning rate at the start of training.
        weight_decay: Weight decay.
        decay_all: Whether biases and norms decay too.
    """

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

    def build(
        self, groups: Groups, capturable: bool = False, compile: Compile = lambda function: function
    ) -> Optimizer:
        """Make the optimizer.

        Args:
            groups: Parameters and weight decay of each group.
            capturable: Whether a CUDA graph will replay its steps: the learning rate is then a tensor.
            compile: Applied to the steps of an optimizer for which torch has no fused kernel.
        """
        if not capturable:
            return self.make(groups, self.lr, False, compile)
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
        return self.make(groups, torch.tensor(self.lr, device=groups[0]["params"][0].device), True, compile)

    def make(self, groups: Groups, lr: float | Tensor, capturable: bool, compile: Compile) -> Optimizer:
        """Make the optimizer with this learning rate, see `build`."""
        raise NotImplementedError

    def groups(self, model: nn.Module) -> Groups:
        """The trainable parameters of a model, by weight decay."""
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
    """Stochastic gradient descent with momentum; L2 weight decay.

    Args:
        momentum: Momentum; 0 for none.
        nesterov: Whether the momentum is Nesterov's.
    """

    momentum: float = 0.9
    nesterov: bool = True

    def make(self, groups: Groups, lr: float | Tensor, capturable: bool, compile: Compile) -> Optimizer:
        nesterov = self.nesterov and self.momentum > 0
        fused = capturable or None
        return SGD(groups, lr=lr, momentum=self.momentum, nesterov=nesterov, fused=fused)


@dataclass(frozen=True, kw_only=True)
class SGDWOptions(OptimizerOptions):
    """SGD with momentum and decoupled weight decay that falls with the learning rate (BSR-Net).

    Args:
        momentum: Momentum; 0 for none.
    """

    momentum: float = 0.9

    def make(self, groups: Groups, lr: float | Tensor, capturable: bool, compile: Compile) -> Optimizer:
        return SGDW(groups, lr=lr, momentum=self.momentum, compile=compile)


@dataclass(frozen=True, kw_only=True)
class AdamOptions(OptimizerOptions):
    """Adam; L2 weight decay.

    Args:
        beta1: Decay of the mean of the gradients.
        beta2: Decay of the mean of the squared gradients.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    kind: ClassVar[type[Adam]] = Adam

    def make(self, groups: Groups, lr: float | Tensor, capturable: bool, compile: Compile) -> Optimizer:
        betas = (self.beta1, self.beta2)
        return self.kind(groups, lr=lr, betas=betas, capturable=capturable, fused=capturable or None)


@dataclass(frozen=True, kw_only=True)
class AdamWOptions(AdamOptions):
    """Adam with decoupled weight decay."""

    weight_decay: float = 1e-2

    kind: ClassVar[type[Adam]] = AdamW


OPTIMIZERS: Catalogue[type[OptimizerOptions]] = Catalogue(
    "optimizer",
    {"sgd": SGDOptions, "sgdw": SGDWOptions, "adam": AdamOptions, "adamw": AdamWOptions},
    group="optimizers",
    base=OptimizerOptions,
)
