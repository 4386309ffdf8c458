"""Helpers for any `torch.nn.Module`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training flag of every module on exit, also after an exception.

    with preserved_modes(model):
        model.eval()
        ...
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training  # `train()` would also reach submodules with a mode of their own
