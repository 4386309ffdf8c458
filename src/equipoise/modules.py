"""Helpers for torch modules and their tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
