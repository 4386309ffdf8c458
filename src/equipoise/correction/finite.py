"""Losses that are NaN or infinite stop a run with a clear word."""

from __future__ import annotations

from torch import Tensor

from equipoise.errors import UserError


class NonFiniteLoss(UserError):
    """A loss is NaN or infinite."""


def check_finite(losses: Tensor, where: str, batches: list[int] | None = None) -> None:
    """Refuse losses of which one is not finite, naming its batch, counted from 1.

    batches: their numbers from 0, where not all of them were run.
    """
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        i = int(bad[0])
        batch = 1 + (i if batches is None else batches[i])
        raise NonFiniteLoss(f"the loss is {float(losses[i])} at batch {batch} of {where}; lower the learning rate")
