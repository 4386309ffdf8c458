"""The batches of a pass: their types, their arguments, and a check of their losses."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import NonFiniteLoss, UserError, one_line

LossFunction = Callable[..., Tensor]  # (model, *batch) -> mean loss of the batch
Batches = Iterable[Any]  # tuples or lists of arguments for the loss function, or single arguments


def as_tuple(batch: Any) -> tuple[Any, ...]:
    """Return the batch of a loader as arguments of a loss function; a single tensor is one argument."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def run_loss(loss_fn: LossFunction, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    """Return the loss of a batch.

    Raises:
        UserError: The function does not take the model and the batch, or its result is not one number.
    """
    try:
        loss = loss_fn(model, *batch)
    except TypeError as error:
        if _reached_user_code(error):
            raise
        raise UserError(
            f"the loss function does not take the model and the {len(batch)} arguments of the batch "
            f"({one_line(str(error), 120)}); write `def loss_fn(model, x, y): return cross_entropy(model(x), y)`"
        ) from None
    if not isinstance(loss, Tensor):
        raise UserError(f"the loss function returned a {type(loss).__name__}; it must return the mean loss, a tensor")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise UserError(f"the loss has the shape {shape}; it must be one number, such as the mean over the batch")
    return loss


def _reached_user_code(error: TypeError) -> bool:
    """Whether a line outside of torch and of this file ran, so that the error is one of the user's function."""
    package = os.path.dirname(torch.__file__)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(file != __file__ and not file.startswith(package) for file in files)


def check_losses(losses: Tensor, where: str, batches: list[int] | None = None) -> None:
    """Raise NonFiniteLoss if a loss of the pass called `where` is NaN or infinite, with the number of its batch.

    `batches` are the indices of the batches, if some of them were left out.
    """
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        i = int(bad[0])
        batch = 1 + (i if batches is None else batches[i])
        raise NonFiniteLoss(f"the loss is {float(losses[i])} at batch {batch} of {where}; lower the learning rate")
