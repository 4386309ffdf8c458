"""Pack a model: its sparse layers store only active values and run in the blocked layout if possible."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError
from equipoise.kernels.library import available
from equipoise.storage.blocked_graph import blocked_graph
from equipoise.storage.packed_modules import BLOCKED_NORMS, BlockedBatchNorm, PackedLayer, packed
from equipoise.storage.shortcut import Run, Shortcut
from equipoise.storage.trace import Reading, is_leaf, read

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def pack_masks(model: nn.Module, masks: Mapping[str, Tensor], precision: str = "float32") -> nn.Module:
    """Return a copy of `model` whose masked layers hold only their active weights.

    Args:
        model: A dense model.
        masks: Boolean masks by parameter name, such as `features.0.weight`.
        precision: As in `add_shortcuts`.

    Raises:
        UserError: If a mask does not belong to a layer that can be packed.
    """
    model = copy.deepcopy(model)
    for name, mask in masks.items():
        pack_layer(model, name, mask)
    return add_shortcuts(model, precision)


def add_shortcuts(model: nn.Module, precision: str = "float32") -> nn.Module:
    """Let the largest parts of a packed model that can be read run in the blocked layout, and return the model.

    Args:
        model: The packed model.
        precision: Activations between the layers of such a part: `float32` or `bf16`.

    Raises:
        UserError: If there is no such precision.
    """
    if precision not in PRECISIONS:
        raise UserError(f'precision must be "float32" or "bf16", not {precision!r}')
    if available():
        _add_shortcuts(model, PRECISIONS[precision])
    return model


def _add_shortcuts(module: nn.Module, dtype: torch.dtype) -> None:
    reading = None if is_leaf(module) else read(module)
    if reading is not None and any(isinstance(part, PackedLayer) for part in reading.modules):
        use_blocked_norms(reading)
        module.forward = BlockedForward(module, dense_layers(module), dtype)
    elif not is_leaf(module):
        for child in module.children():
            _add_shortcuts(child, dtype)


def use_blocked_norms(reading: Reading) -> None:
    """Let torch's norms take blocked activations as well; they stay the same objects."""
    for module in reading.modules:
        if type(module) in BLOCKED_NORMS:
            BlockedBatchNorm.from_torch(cast(_BatchNorm, module))


def dense_layers(model: nn.Module) -> frozenset[str]:
    """Return the names of the packed layers for which torch's dense operation is faster."""
    return frozenset(name for name, layer in model.named_modules() if isinstance(layer, PackedLayer) and layer.dense)


class BlockedForward(Shortcut):
    """The forward of a packed model, with activations in the blocked layout from layer to layer.

    Args:
        module: The module.
        dense: Layers that run dense, on plain tensors. They are those of the model when it is packed, so that a run
            whose density changes computes the same numbers if it is stopped and resumed.
        dtype: Type of the blocked activations. In bfloat16 the shortcut also runs under autocast.
    """

    def __init__(self, module: nn.Module, dense: frozenset[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(module)
        self._dense, self._dtype = dense, dtype
        self.runs_in_autocast = dtype is torch.bfloat16

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self._dense, self._dtype)

    def compile(self, reading: Reading, tokens: frozenset[str], exact: bool = False) -> Run:
        dtype = torch.float32 if exact else self._dtype
        graph = blocked_graph(reading.graph, self.module, tokens | self._dense, dtype)
        return type(fx.GraphModule(self.module, graph)).forward  # a function of the module, which it does not keep


def blocked_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that run in the blocked layout as a whole; "" is the model itself."""
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), BlockedForward)]


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
    if "weight" not in layer._parameters:
        raise UserError(f'cannot pack "{name}": a hook computes it at every call; use masked storage')
    if not path:
        raise UserError("a single layer cannot be packed in place; wrap it in nn.Sequential")
    if (tied := tied_parameters(model, path)) is not None:
        raise UserError(f"cannot pack the model: {tied}")
    vars(replacement).update({key: value for key, value in vars(layer).items() if "ward_" in key and "hook" in key})
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
