"""Input normalisation as the first layer of a model, so that attacks and loaders work on raw pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.errors import UserError


class Normalize(nn.Module):
    """(x - mean) / std per channel; the identity until `set` is called.

    Keeping it inside the model lets an attack bound its perturbation in pixel units ([0, 1]) while the
    network sees normalised images. Mean and std belong to the data, not to what was learned: the buffers
    move with `model.to(device)` but are no part of the state_dict.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(1, channels, 1, 1), persistent=False)

    def set(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Use these statistics, one number per channel, from now on."""
        new_mean, new_std = self._per_channel("mean", mean), self._per_channel("std", std)
        if not (new_std > 0).all():
            raise UserError(f"std is {new_std.flatten().tolist()}; every channel needs a number above 0")
        # In place, so that traced, compiled and CUDA-graphed copies of the model see the change too.
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
            raise UserError(f"{name} is {numbers.tolist()}; every channel needs a finite number")
        return numbers.view_as(self.mean)
