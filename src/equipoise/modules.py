"""Helpers for torch modules and their tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equipoise.checks import kind_of
from equipoise.errors import UserError


def require_model(call: str, model: object) -> None:
    """Raise unless `model` is a module of torch.

    Args:
        call: The call that was given the model; the error message begins with it.
        model: The argument.

    Raises:
        UserError: If it is something else.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"{call}: the model is a {kind_of(model)}; pass a torch.nn.Module")


def require_values(name: str, weight: Tensor) -> None:
    """Raise unless a weight has values.

    Raises:
        UserError: If it is on the meta device.
    """
    if weight.is_meta:
        raise UserError(
            f'"{name}" is on the meta device and has no values; call model.to_empty(device="cpu") and load its '
            "state_dict first"
        )


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module of a model at the end of the block.

    `model.train()` alone would put modules into training mode that were in evaluation mode before.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training  # `train()` would also reach submodules with a mode of their own


@contextmanager
def preserved_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors, such as the buffers of a model, at the end of the block."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)


def transformers_conv1d() -> tuple[type[nn.Module], ...]:
    """Return the type `Conv1D` of transformers, a linear layer whose weight has shape (inputs, outputs), as in GPT-2.

    Empty if transformers is not loaded: then no model has such a layer.
    """
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if kind is None else (kind,)
