"""Packing a model for an algorithm, and the packed layers of a model as a topology sees them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.layer import Layer
from equipoise.storage.pack import pack_layer, pack_masks, tied_parameters, traced_or_same
from equipoise.storage.packed import PackedWeight
from equipoise.storage.packed_modules import PackedLayer, is_packable
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.distribution import active_counts
from equipoise.topology.initial import plan_layers

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology


def pack(model: nn.Module, what: Mapping[str, Tensor] | Algorithm | Topology) -> nn.Module:
    """A copy of `model` whose sparse layers hold only their active weights; the same function.

    `what` says which weights are active: masks by parameter name ("features.0.weight"), an attached topology, or an
    algorithm such as `SET(sparsity=0.99)`. With an algorithm the copy begins with the mask that attaching it to
    `model` would give, and trains in packed storage once the algorithm is attached to it:

        model = equipoise.storage.pack(model, SET(sparsity=0.99))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        topology = SET(sparsity=0.99).attach(model, optimizer, total_steps)

    A model that torch.fx can trace keeps its activations in the blocked layout from layer to layer; any other runs
    with conversions around each packed layer. Not traced either is a model whose forward does in Python what tracing
    would write down once and for all, or not at all: look at `self.training`, draw random numbers, read a packed
    weight, set attributes, use `torch.no_grad`; or one that changes a tensor in place and then uses it by its old
    name. `unpack` is the way back.

    What does not survive: a traced model is an `fx.GraphModule` with the forward of the class but none of its other
    methods, and hooks on packed layers and on the norms after them are gone. The weight of a packed layer is a vector
    called `values`; an optimizer that leaves vectors out of weight decay by `ndim` must go by name instead. Frozen
    weights stay frozen. Tied weights cannot be packed.
    """
    if isinstance(what, Mapping):
        return pack_masks(model, what)
    plan = plan_layers(what, model) if isinstance(what, Algorithm) else []  # what it refuses may not be copied
    model = copy.deepcopy(model)
    if isinstance(what, Algorithm):
        for planned in plan:
            mask = torch.zeros(planned.weight.numel(), dtype=torch.bool).index_fill_(0, planned.active, True)
            layer = pack_layer(model, planned.name, mask.view(planned.weight.shape))
            layer.final, layer.memory = planned.final, what.bits_to_remember(planned.weight.detach())
    else:
        for name, mask in what.masks.items():
            pack_layer(model, name, mask).final = next(layer.final for layer in what.layers if layer.name == name)
    return traced_or_same(model)


def why_not(model: nn.Module, algorithm: Algorithm) -> str | None:
    """What keeps a model from being packed; None where nothing does."""
    for planned in plan_layers(algorithm, model):
        path, _, leaf = planned.name.rpartition(".")
        layer = model.get_submodule(path)
        if leaf != "weight" or not path or not is_packable(layer):
            return f'"{planned.name}" belongs to a {type(layer).__name__} that has no packed form'
        if planned.weight.dtype != torch.float32 or planned.weight.device.type != "cpu":
            return f"packed weights are float32 on a CPU, not {planned.weight.dtype} on {planned.weight.device}"
        if (tied := tied_parameters(model, path)) is not None:
            return tied
    return None


def packed_weights(algorithm: Algorithm, model: nn.Module) -> list[Layer]:
    """The layers of a model that `equipoise.storage.pack` has packed; none where it has not."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PackedLayer)}
    if not modules or algorithm.sparsity == 0:
        return []
    if getattr(algorithm, "growth", "batch") == "corrected":
        raise UserError('growth="corrected" needs old gradients of inactive weights: use masked storage')
    names = {name: f"{name}.weight" for name in modules}
    missing = {name for name, module in modules.items() if module.final is None}
    shapes = {names[name]: module.weight_shape for name, module in modules.items()}
    counts = active_counts(algorithm.distribution, shapes, 1 - algorithm.sparsity, model) if missing else {}
    if not missing:
        _check_counts(algorithm, {names[name]: module for name, module in modules.items()}, model)
    layers: list[Layer] = []
    for name, module in modules.items():
        final = counts[names[name]] if module.final is None else module.final
        layers.append(PackedWeight(names[name], module, final))
        algorithm.prepare(layers[-1])
    return layers


def _check_counts(algorithm: Algorithm, modules: Mapping[str, PackedLayer], model: nn.Module) -> None:
    """Refuse an algorithm that would end with other counts than the one the model was packed for."""
    if algorithm.distribution == "bsr" and getattr(model, "bsr_densities", None) is None:
        return  # a traced model has lost the table that these counts come from
    wanted = algorithm.final_counts({name: module.weight_shape for name, module in modules.items()}, model)
    size = sum(module.shape.weight_numel for module in modules.values())
    packed = sum(module.final or 0 for module in modules.values())
    for name, module in modules.items():
        if module.final != wanted[name]:
            raise UserError(
                f"the model was packed for a density of {packed / size:.4g}, {type(algorithm).__name__} is to have "
                f'{sum(wanted.values()) / size:.4g} ("{name}": {module.final} and {wanted[name]} active weights); '
                "pack and attach the same algorithm"
            )
