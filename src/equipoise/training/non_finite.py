"""Losses, gradients and weights that are NaN or infinite: found at no cost, and reported with their layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from equipoise.errors import NonFiniteLoss
from equipoise.training.convert_storage import plain_names

ADVICE = "the last checkpoint is intact, lower the learning rate"


def check_loss(loss: Tensor, model: nn.Module, images: Tensor, epoch: int, batch: int) -> None:
    """Refuse a loss that is not finite, before its gradient is used. Epochs and batches are counted from 0.

    Only then is the layer searched for: that of a weight that is not finite after the previous step, or the first one
    whose output is not finite.
    """
    if math.isfinite(loss.item()):
        return
    check_weights(model, epoch, batch)
    layer = first_bad_output(model, images)
    at = f" (first in the output of {layer})" if layer else ""
    raise NonFiniteLoss(f"the loss is not finite at {_place(epoch, batch + 1)}{at}; {ADVICE}")


def check_weights(model: nn.Module, epoch: int, steps: int) -> None:
    """Refuse weights that are not finite after `steps` steps of an epoch: the last of them had a bad gradient."""
    named = plain_names(model)
    weights = [(named[id(p)], p.detach()) for p in model.parameters()]
    layer = _last_bad(weights)
    if layer:
        _refuse_gradient(layer, epoch, steps)


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    largest: float,
    epoch: int,
    batch: int,
    gradient_of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad,
) -> None:
    """Scale the gradients down to a norm of at most `largest`; on a CPU refuse those that are not finite.

    Args:
        optimizer: Its tensors have the gradients.
        model: Its layers are named in the error.
        largest: Largest norm.
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 0.
        gradient_of: The gradient of a parameter of the model.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        nn.utils.clip_grad_norm_(stepped, largest, error_if_nonfinite=stepped[0].device.type == "cpu")
    except RuntimeError:
        named = plain_names(model)
        found = [(named[id(p)], gradient_of(p)) for p in model.parameters() if p.requires_grad]
        layer = _last_bad([(name, gradient) for name, gradient in found if gradient is not None])
        _refuse_gradient(layer or "the model", epoch, batch + 1)  # or each is finite and their norm is too large


def _refuse_gradient(layer: str, epoch: int, number: int) -> NoReturn:
    raise NonFiniteLoss(f"the gradient of {layer} is not finite at {_place(epoch, number)}; {ADVICE}")


def _place(epoch: int, number: int) -> str:
    return f"batch {number} of epoch {epoch + 1}"


def _last_bad(tensors: list[tuple[str, Tensor]]) -> str | None:
    """The bad one nearest to the loss: a backward pass carries it to all layers before."""
    if not tensors:
        return None
    sound = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist()
    bad = [name for (name, _), fine in zip(tensors, sound, strict=True) if not fine]
    return bad[-1] if bad else None


@torch.no_grad()
def first_bad_output(model: nn.Module, images: Tensor) -> str | None:
    """The first layer whose output for these images is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return hook

    leaves = [(name, layer) for name, layer in model.named_modules() if name and not list(layer.children())]
    handles = [layer.register_forward_hook(look(name)) for name, layer in leaves]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
