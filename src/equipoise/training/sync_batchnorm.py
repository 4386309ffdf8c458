"""BatchNorm with the statistics of all processes, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.world import World


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of the whole batch, over all processes.

    torch's SyncBatchNorm supports GPUs only. Parameters, buffers and their names are those of torch's BatchNorm, and
    the results equal those of one process that has the whole batch.
    """

    world: World
    _normalise: Callable[..., Any]

    @classmethod
    def from_torch(cls, norm: _BatchNorm, world: World) -> SyncedBatchNorm:
        """Return a synchronised norm that shares parameters and buffers with `norm`."""
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(norm, name))
        new.world = world
        # Compiled code would have to trace the collectives. Importing the compiler takes seconds: only for GPUs.
        new._normalise = torch.compiler.disable(_Normalise.apply) if world.device.type == "cuda" else _Normalise.apply
        return new.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        y, mean, variance, count = self._normalise(x, self.weight, self.bias, self.eps, self.world)
        if self.training and self.running_mean is not None and self.running_var is not None:
            factor = self._factor()
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean), factor)
                unbiased = variance * count / (count - 1)
                self.running_var.lerp_(unbiased.to(self.running_var), factor)
        return cast(Tensor, y)

    def _factor(self) -> float | Tensor:
        """Count this batch and return its weight in the running average; does not wait for a GPU."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return self.num_batches_tracked.to(self.running_mean).reciprocal() if self.momentum is None else self.momentum

    def _check_input_dim(self, x: Tensor) -> None:
        """Take inputs of any number of dimensions: this class replaces all kinds of BatchNorm."""


def synchronise(model: nn.Module, world: World) -> nn.Module:
    """Replace every BatchNorm of a model by a `SyncedBatchNorm`; a single process keeps torch's."""
    if world.alone:
        return model
    if isinstance(model, _BatchNorm):
        return SyncedBatchNorm.from_torch(model, world)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, SyncedBatchNorm):
                setattr(parent, name, SyncedBatchNorm.from_torch(child, world))
    return model


class _Normalise(torch.autograd.Function):
    """Normalisation with one collective per direction: moments and count forward, two sums per channel backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, world: World
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [0, *range(2, x.dim())]
        here = wide.new_full((1,), x.numel() // x.shape[1])
        mean = wide.mean(axes)
        squares = (wide - _along(mean, x)).square().sum(axes)
        means, all_squares, counts = world.all_gather(torch.cat([mean, squares, here])).split(
            [len(mean), len(mean), 1], 1
        )
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        # variance within the processes plus variance of their means
        variance = (all_squares.sum(0) + ((means - mean).square() * counts).sum(0)) / count
        scale = (variance + eps).rsqrt()
        normal = (wide - _along(mean, x)) * _along(scale, x)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.world, ctx.has_bias = world, bias is not None
        y = normal if weight is None else normal * _along(weight, x)
        y = y if bias is None else y + _along(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        wide, axes = dy.to(normal.dtype), [0, *range(2, dy.dim())]
        along_normal, total = (wide * normal).sum(axes), wide.sum(axes)
        sums = ctx.world.all_reduce(torch.stack([along_normal, total])) / count
        dx = wide - _along(sums[1], dy) - normal * _along(sums[0], dy)
        dx *= _along(scale if weight is None else scale * weight, dy)
        # not reduced here: the gradients of all parameters are averaged over the processes later
        dweight = None if weight is None else along_normal.to(weight.dtype)
        return dx.to(dy.dtype), dweight, total if ctx.has_bias else None, None, None


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Shape one number per channel to broadcast over `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
