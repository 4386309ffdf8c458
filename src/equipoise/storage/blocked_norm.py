"""BatchNorm for plain and blocked activations."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError
from equipoise.kernels import operators
from equipoise.kernels.blocked import Blocked
from equipoise.kernels.geometry import NO_BORDER, Border


class BlockedBatchNorm(_BatchNorm):
    """BatchNorm that also takes blocked activations, with the residual, ReLU and max-pool after it in the same pass.

    Parameters, buffers and their names are those of torch's BatchNorm, and so are the results.
    """

    @classmethod
    def from_torch(cls, norm: _BatchNorm) -> BlockedBatchNorm:
        """Let a BatchNorm1d or BatchNorm2d of torch take blocked activations; it stays the same object."""
        norm.__class__ = BLOCKED_NORMS[type(norm)]
        return cast(BlockedBatchNorm, norm)

    def forward(  # type: ignore[override]
        self,
        x: Tensor | Blocked,
        residual: Blocked | None = None,
        relu: bool = False,
        pool: bool = False,
        border: Border = NO_BORDER,
    ) -> Tensor | Blocked:
        if isinstance(x, Tensor):
            return super().forward(x)
        self.check_channels(x.data.shape[1])
        by_batch = self.training or self.running_mean is None
        how = operators.Fused(
            operators.BATCH if by_batch else operators.FIXED, relu, pool, self.eps, self._momentum(), border
        )
        running = None if self.running_mean is None else (self.running_mean, cast(Tensor, self.running_var))
        return operators.fused(x, how, self.weight, self.bias, running, residual)

    def check_channels(self, channels: int) -> None:
        """Refuse another number of channels, and parameters or statistics of another length."""
        if channels != self.num_features:
            raise UserError(f"BatchNorm takes {self.num_features} channels, the input has {channels}")
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != (channels,):
                raise UserError(f"{name} of a BatchNorm of {channels} channels has the shape {list(tensor.shape)}")

    def _momentum(self) -> float:
        """Count this batch and return its weight in the running average."""
        if not self.training or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class BlockedBatchNorm1d(BlockedBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d for plain and blocked activations."""


class BlockedBatchNorm2d(BlockedBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d for plain and blocked activations."""


BLOCKED_NORMS: dict[type[_BatchNorm], type[BlockedBatchNorm]] = {
    nn.BatchNorm1d: BlockedBatchNorm1d,
    nn.BatchNorm2d: BlockedBatchNorm2d,
}
