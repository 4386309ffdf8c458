"""Find losses, gradients and weights that are NaN or infinite, and name their layer."""

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
    """Raise an error if a loss is not finite, before its gradient is used.

    The error names the layer of a weight that is not finite after the previous step, or the first layer whose output
    is not finite. A finite loss costs no search.

    Args:
        loss: The loss.
        model: The model.
        images: The images of the loss.
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 0.

    Raises:
        NonFiniteLoss: If the loss is not finite.
    """
    if math.isfinite(loss.item()):
        return
    check_weights(model, epoch, batch)
    layer = first_bad_output(model, images)
    at = f" (first in the output of {layer})" if layer else ""
    raise NonFiniteLoss(f"the loss is not finite at {_batch(epoch, batch + 1)}{at}; {ADVICE}")


def check_weights(model: nn.Module, epoch: int, steps: int) -> None:
    """Raise an error if weights are not finite after `steps` steps of an epoch: the last gradient was not finite."""
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
    """Clip the gradients to a norm of at most `largest`. On a CPU, raise an error if they are not finite.

    Args:
        optimizer: The optimizer of the tensors that have the gradients.
        model: The model whose layers the error names.
        largest: Largest norm.
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 0.
        gradient_of: Returns the gradient of a parameter of the model.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        nn.utils.clip_grad_norm_(stepped, largest, error_if_nonfinite=stepped[0].device.type == "cpu")
    except RuntimeError:
        named = plain_names(model)
        found = [(named[id(p)], gradient_of(p)) for p in model.parameters() if p.requires_grad]
        layer = _last_bad([(name, gradient) for name, gradient in found if gradient is not None])
        _refuse_gradient(layer or "the model", epoch, batch + 1)  # no layer if only the norm overflows


def _refuse_gradient(layer: str, epoch: int, number: int) -> NoReturn:
    raise NonFiniteLoss(f"the gradient of {layer} is not finite at {_batch(epoch, number)}; {ADVICE}")


def _batch(epoch: int, number: int) -> str:
    return f"batch {number} of epoch {epoch + 1}"


def _last_bad(tensors: list[tuple[str, Tensor]]) -> str | None:
    """The last tensor that is not finite: a backward pass spreads NaN to all earlier layers."""
    if not tensors:
        return None
    sound = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist()
    bad = [name for (name, _), fine in zip(tensors, sound, strict=True) if not fine]
    return bad[-1] if bad else None


@torch.no_grad()
def first_bad_output(model: nn.Module, images: Tensor) -> str | None:
    """Return the first layer whose output for these images is not finite; `None` if all are finite."""
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
