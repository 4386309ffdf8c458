"""Packing a model: its sparse layers store active values only and run in the blocked layout where they can."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError
from equipoise.kernels import library as kernels
from equipoise.storage.blocked_graph import blocked_graph
from equipoise.storage.packed_model import PackedModel
from equipoise.storage.packed_modules import BlockedBatchNorm, PackedLayer, packed
from equipoise.storage.trace import Tracer, faithful_graph


class _Tracer(Tracer):
    """Packed layers and norms are leaves, like torch's own layers; not norms whose forward is their own."""

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        ours = isinstance(module, (PackedLayer, BlockedBatchNorm))
        norm = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
        return ours or norm or super().is_leaf_module(module, qualified_name)


def pack_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` whose layers with a mask, by parameter name, hold only their active weights."""
    model = copy.deepcopy(model)
    for name, mask in masks.items():
        pack_layer(model, name, mask)
    return traced_or_same(model)


def traced_or_same(model: nn.Module) -> nn.Module:
    """The packed model in the blocked layout from layer to layer; as it is where it cannot be traced."""
    if not kernels.available() or not any(isinstance(module, PackedLayer) for module in model.modules()):
        return model
    traced = trace(model)
    return model if traced is None else traced


def trace(model: nn.Module, modes: tuple[bool, ...] = (True, False)) -> fx.GraphModule | None:
    """The packed model, in the blocked layout from layer to layer; None where its forward cannot be traced."""
    graph = faithful_graph(model, _Tracer, modes)
    return None if graph is None else _graph_module(model, blocked_graph(graph, model))


def unpack(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state_dict of the model that was packed, with its usual keys, and the masks."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLayer)}
    state: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        owner, _, leaf = key.rpartition(".")
        if owner not in layers or leaf == "bias":
            state[key] = tensor
        elif leaf == "values":
            name = f"{owner}.weight" if owner else "weight"
            state[name] = layers[owner].weight.detach()
            masks[name] = layers[owner].mask
    return state, masks


def describe(model: nn.Module) -> dict[str, str]:
    """How each packed layer runs, by name."""
    return {name: layer.how() for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}


def pack_layer(
    model: nn.Module, name: str, mask: Tensor, final: int | None = None, memory: Tensor | None = None
) -> PackedLayer:
    path, _, leaf = name.rpartition(".")
    parent_path, _, attribute = path.rpartition(".")
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        raise UserError(f'the model has no layer for the mask "{name}"') from None
    replacement = packed(layer, mask, final, memory) if leaf == "weight" else None
    if replacement is None:
        raise UserError(
            f'cannot pack "{name}" of a {type(layer).__name__}: packed are the weights of Linear, Conv1d and Conv2d '
            f'with equal zero padding on both sides; leave it out with exclude=("{path or name}",) or no mask, '
            "or use masked storage"
        )
    if not path:
        raise UserError("a single layer cannot be packed in place; wrap it in nn.Sequential")
    if (tied := tied_parameters(model, path)) is not None:
        raise UserError(f"cannot pack the model: {tied}")
    setattr(model.get_submodule(parent_path), attribute, replacement.train(layer.training))
    return replacement


def tied_parameters(model: nn.Module, path: str) -> str | None:
    """What is wrong with packing a layer that shares its parameters: the copy would go its own way in training."""
    everywhere = list(model.named_parameters(remove_duplicate=False))
    for leaf, mine in model.get_submodule(path).named_parameters(recurse=False):
        names = [name for name, other in everywhere if other is mine]
        if len(names) > 1:
            # a topology knows a tied weight by its first name
            owner = names[0].rpartition(".")[0] if leaf == "weight" else path
            return (
                f'"{names[0]}" and "{names[1]}" are one tensor, and packing would part them; '
                f'leave it out with exclude=("{owner}",) or no mask, or use masked storage'
            )
    return None


def _graph_module(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The traced model, with whatever state its forward does not touch kept under its name."""
    traced = PackedModel(model, graph, class_name=type(model).__name__)
    have = dict(traced.named_modules())
    for name, module in model.named_modules(remove_duplicate=False):
        if name and name not in have and any(True for _ in module.state_dict()):
            traced.add_submodule(name, module)
    for name, module in traced.named_modules():
        old = model.get_submodule(name)
        made = module._buffers.keys() - old._buffers.keys()  # fx makes buffers of tensors that are plain attributes
        module._non_persistent_buffers_set = old._non_persistent_buffers_set | made
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            owner, _, leaf = name.rpartition(".")
            target = traced.get_submodule(owner)
            if not hasattr(target, leaf):
                _register(target, kind, leaf, tensor)
    _order_like(traced, model)
    for name, module in traced.named_modules():
        module.training = model.get_submodule(name).training  # parts of a model may be in eval mode for good
    return traced


def _order_like(traced: nn.Module, model: nn.Module) -> None:
    """Parameters in the order of the model, whatever order its forward has: optimizers count them by position."""
    names = [name for name in model._modules if name in traced._modules]
    traced._modules = {name: traced._modules[name] for name in [*names, *traced._modules]}
    for name in names:
        child, own = model._modules[name], traced._modules[name]
        if child is not None and own is not None and own is not child:
            _order_like(own, child)


def _register(module: nn.Module, kind: str, name: str, tensor: Any) -> None:
    if kind == "parameter":
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)
