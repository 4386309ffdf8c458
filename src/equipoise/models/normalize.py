"""Input normalisation as the first layer of a model, so that attacks and loaders work on pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.errors import UserError


class Normalize(nn.Module):
    """Compute (x - mean) / std per channel; the identity until `set` is called.

    Because it is part of the model, an attack can bound its perturbation in pixel units. Mean and std are
    properties of the data and are not learned: the buffers move with `model.to(device)` but are not in the
    state_dict.

    Args:
        channels: Number of input channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(1, channels, 1, 1), persistent=False)

    def set(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Set the statistics.

        Args:
            mean: One number per channel.
            std: One number above 0 per channel.
        """
        new_mean, new_std = self._per_channel("mean", mean), self._per_channel("std", std)
        if not (new_std > 0).all():
            raise UserError(f"std={new_std.flatten().tolist()} must be above 0 for every channel")
        # In place, so that traced, compiled and captured copies of the model see the change.
        self.mean.copy_(new_mean)
        self.std.copy_(new_std)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def _per_channel(self, name: str, values: Sequence[float] | Tensor) -> Tensor:
        numbers = torch.as_tensor(values, dtype=self.mean.dtype, device=self.mean.device).flatten()
        channels = self.mean.numel()
        if numbers.numel() != channels:
            raise UserError(f"{name} has {numbers.numel()} numbers; the model's input has {channels} channels")
        if not numbers.isfinite().all():
            raise UserError(f"{name}={numbers.tolist()} must be finite for every channel")
        return numbers.view_as(self.mean)
