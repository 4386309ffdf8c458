"""The batches of a pass: their types, their arguments, and a check of their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from equipoise.errors import NonFiniteLoss

LossFunction = Callable[..., Tensor]  # (model, *batch) -> mean loss of the batch
Batches = Iterable[Any]  # tuples or lists of arguments for the loss function, or single arguments


def as_tuple(batch: Any) -> tuple[Any, ...]:
    """Return the batch of a loader as arguments of a loss function; a single tensor is one argument."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def check_losses(losses: Tensor, where: str, batches: list[int] | None = None) -> None:
    """Raise NonFiniteLoss if a loss of the pass called `where` is NaN or infinite, with the number of its batch.

    `batches` are the indices of the batches, if some of them were left out.
    """
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        i = int(bad[0])
        batch = 1 + (i if batches is None else batches[i])
        raise NonFiniteLoss(f"the loss is {float(losses[i])} at batch {batch} of {where}; lower the learning rate")
