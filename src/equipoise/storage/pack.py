"""Pack a model: its sparse layers store only active values and run in the blocked layout if possible."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError
from equipoise.kernels.library import available
from equipoise.storage.blocked_graph import blocked_graph
from equipoise.storage.packed_model import PackedModel
from equipoise.storage.packed_modules import BlockedBatchNorm, PackedLayer, packed
from equipoise.storage.trace import Tracer, faithful_graph


class _Tracer(Tracer):
    """Treats packed layers and norms as leaves, like torch's layers, except norms with a custom forward."""

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        ours = isinstance(module, (PackedLayer, BlockedBatchNorm))
        norm = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
        return ours or norm or super().is_leaf_module(module, qualified_name)


def pack_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of `model` whose masked layers hold only their active weights.

    Args:
        model: A dense model.
        masks: Boolean masks by parameter name, such as `features.0.weight`.

    Raises:
        UserError: If a mask does not belong to a layer that can be packed.
    """
    model = copy.deepcopy(model)
    for name, mask in masks.items():
        pack_layer(model, name, mask)
    return traced_or_same(model)


def traced_or_same(model: nn.Module) -> nn.Module:
    """Return the packed model in the blocked layout from layer to layer, or unchanged if it cannot be traced."""
    if not available() or not any(isinstance(module, PackedLayer) for module in model.modules()):
        return model
    traced = trace(model)
    return model if traced is None else traced


def trace(model: nn.Module, modes: tuple[bool, ...] = (True, False)) -> fx.GraphModule | None:
    """Return the packed model in the blocked layout from layer to layer; `None` if its forward cannot be traced.

    Args:
        model: A packed model.
        modes: Modes in which the result must be valid; `True` is train mode.
    """
    graph = faithful_graph(model, _Tracer, modes)
    return None if graph is None else _graph_module(model, blocked_graph(graph, model))


def unpack(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state_dict of the model before packing, with its usual keys, and the masks by parameter name."""
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
    """Return how each packed layer runs, by name: `sparse`, or `dense` with the reason."""
    return {name: layer.how() for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}


def pack_layer(
    model: nn.Module, name: str, mask: Tensor, final: int | None = None, memory: Tensor | None = None
) -> PackedLayer:
    """Replace the layer of the weight `name` by its packed form, in place, and return it.

    Args:
        model: The model.
        name: The weight, such as `features.0.weight`.
        mask: Its active entries.
        final: As in `PackedLayer`.
        memory: As in `PackedLayer`.

    Raises:
        UserError: If the layer cannot be packed.
    """
    path, _, leaf = name.rpartition(".")
    parent_path, _, attribute = path.rpartition(".")
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        raise UserError(f'the model has no layer for the mask "{name}"') from None
    replacement = packed(layer, mask, final, memory) if leaf == "weight" else None
    if replacement is None:
        raise UserError(
            f'cannot pack "{name}" of a {type(layer).__name__}: only the weights of Linear, Conv1d and Conv2d with '
            "equal zero padding on both sides can be packed; "
            f'leave it out with exclude=("{path or name}",) or no mask, or use masked storage'
        )
    if not path:
        raise UserError("a single layer cannot be packed in place; wrap it in nn.Sequential")
    if (tied := tied_parameters(model, path)) is not None:
        raise UserError(f"cannot pack the model: {tied}")
    setattr(model.get_submodule(parent_path), attribute, replacement.train(layer.training))
    return replacement


def tied_parameters(model: nn.Module, path: str) -> str | None:
    """Return why a layer with tied parameters cannot be packed; `None` if none is tied.

    The packed copy of a tied parameter would be trained separately.
    """
    everywhere = list(model.named_parameters(remove_duplicate=False))
    for leaf, mine in model.get_submodule(path).named_parameters(recurse=False):
        names = [name for name, other in everywhere if other is mine]
        if len(names) > 1:
            # a topology lists a tied weight under its first name
            owner = names[0].rpartition(".")[0] if leaf == "weight" else path
            return (
                f'"{names[0]}" and "{names[1]}" are one tensor, and packing would separate them; '
                f'leave it out with exclude=("{owner}",) or no mask, or use masked storage'
            )
    return None


def _graph_module(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return the traced model, including the state that its forward does not use."""
    traced = PackedModel(model, graph, class_name=type(model).__name__)
    have = dict(traced.named_modules())
    for name, module in model.named_modules(remove_duplicate=False):
        if name and name not in have and any(True for _ in module.state_dict()):
            traced.add_submodule(name, module)
    for name, module in traced.named_modules():
        old = model.get_submodule(name)
        made = module._buffers.keys() - old._buffers.keys()  # fx turns tensors that are plain attributes into buffers
        module._non_persistent_buffers_set = old._non_persistent_buffers_set | made
    for kind, named in (("_parameters", model.named_parameters()), ("_buffers", model.named_buffers())):
        for name, tensor in named:
            owner, _, leaf = name.rpartition(".")
            target = traced.get_submodule(owner)
            if not hasattr(target, leaf):
                getattr(target, kind)[leaf] = tensor
    _order_like(traced, model)
    for name, module in traced.named_modules():
        module.training = model.get_submodule(name).training  # parts may be in eval mode
    return traced


def _order_like(traced: nn.Module, model: nn.Module) -> None:
    """Order modules as in the model, not as in its forward: optimizers number parameters by their order."""
    names = [name for name in model._modules if name in traced._modules]
    traced._modules = {name: traced._modules[name] for name in [*names, *traced._modules]}
    for name in names:
        theirs, ours = model._modules[name], traced._modules[name]
        if theirs is not None and ours is not None and ours is not theirs:
            _order_like(ours, theirs)
