"""Units of sparse layers that take no part in the computation.

A unit is an output of a layer: a channel of a convolution or a feature of a linear layer. If no loss depends on its
output, its weights have no gradient: they are not trained, and algorithms that grow weights by their gradient never
grow them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.modules import preserved_modes
from equipoise.topology import Topology


@dataclass(frozen=True)
class Units:
    """The units of one sparse layer.

    Attributes:
        total: Number of units.
        without_inputs: Number of units without an active weight.
        silent: Number of units on which no loss depends: their ReLU never fires, or no later layer reads them.
        unread: Number of inputs of the layer that no active weight reads.
    """

    total: int
    without_inputs: int
    silent: int
    unread: int


def count_units(model: nn.Module, topology: Topology, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Units]:
    """Count the units of linear layers and convolutions of a classifier, by the name of their weight.

    Args:
        model: The model, in masked storage. It runs in eval mode and is left unchanged.
        topology: Its topology.
        batches: Inputs and labels. A unit is silent if the losses of all of them are independent of it.
    """
    names = {id(layer.parameter): layer.name for layer in topology.layers}
    heard: dict[str, Tensor] = {}

    def listen(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: hear(names[id(module.weight)], _per_unit(module, gradient)))

    def hear(name: str, found: Tensor) -> None:
        heard[name] = heard[name] | found if name in heard else found

    layers = [m for m in model.modules() if isinstance(m, LAYERS) and id(m.weight) in names]
    hooks = [layer.register_forward_hook(listen) for layer in layers]
    try:
        with preserved_modes(model), torch.enable_grad():
            model.eval()
            for x, y in batches:
                x = x.detach().requires_grad_()  # of the losses, only this gradient is kept
                torch.autograd.grad(nn.functional.cross_entropy(model(x), y), x)
    finally:
        for hook in hooks:
            hook.remove()
    masks = topology.masks
    return {
        names[id(m.weight)]: _units(m, masks[names[id(m.weight)]], heard.get(names[id(m.weight)])) for m in layers
    }


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _per_unit(module: nn.Module, gradient: Tensor) -> Tensor:
    """Whether any entry of the gradient of an output is nonzero, for each unit."""
    axis = -1 if isinstance(module, nn.Linear) else 1
    return (gradient != 0).movedim(axis, 0).flatten(1).any(1)


def _units(module: nn.Module, mask: Tensor, heard: Tensor | None) -> Units:
    by_group = mask.reshape(getattr(module, "groups", 1), -1, mask.shape[1], mask[0, 0].numel())
    return Units(
        total=len(mask),
        without_inputs=int((~mask.flatten(1).any(1)).sum()),
        silent=len(mask) if heard is None else int((~heard).sum()),
        unread=int((~by_group.any(3).any(1)).sum()),
    )
