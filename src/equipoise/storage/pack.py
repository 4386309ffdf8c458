"""Pack a model: its sparse layers store only active values and run in the blocked layout if possible."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList

from equipoise.checks import kind_of, require_precision
from equipoise.config import shown
from equipoise.errors import UserError
from equipoise.kernels.boundary import lanes
from equipoise.kernels.library import LANES, available
from equipoise.modules import require_model, require_values
from equipoise.storage.bf16_attention import has_bf16_attention, replace_calls, use_bf16_attention
from equipoise.storage.blocked_graph import blocked_graph
from equipoise.storage.blocked_norm import BLOCKED_NORMS, BlockedBatchNorm
from equipoise.storage.choice import Choice, choose
from equipoise.storage.layer_cost import padding
from equipoise.storage.packed_attention import PROJECTIONS, PackedAttention, is_attention
from equipoise.storage.packed_modules import PackedLayer, no_kernel, packed, weight_name
from equipoise.storage.packed_other import PackedOther
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
    for name, mask in masks.items():
        if not isinstance(name, str) or not isinstance(mask, Tensor):
            raise UserError(
                f"the mask of {shown(name)} is a {kind_of(mask)}; pass boolean tensors by parameter name, such as "
                '"features.0.weight"'
            )
    check_packable(model, masks)
    model = copy.deepcopy(model)
    for name, mask in masks.items():
        pack_layer(model, name, mask)
    return add_shortcuts(model, precision)


def add_shortcuts(model: nn.Module, precision: str = "float32") -> nn.Module:
    """Let the largest parts of a packed model that can be read run in the blocked layout if it is faster.

    In bf16, attention computes with bf16 operands too.

    Args:
        model: The packed model.
        precision: Activations between the layers of such a part: `float32` or `bf16`.

    Returns:
        The model.

    Raises:
        UserError: If there is no such precision.
    """
    require_precision(precision)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(part, PackedLayer) for part in encoder.modules()
        ):
            encoder.use_nested_tensor = False  # only torch's fused kernels take nested tensors
    if available():
        _add_shortcuts(model, PRECISIONS[precision])
    if precision == "bf16":
        use_bf16_attention(model)
    return model


def _add_shortcuts(module: nn.Module, dtype: torch.dtype) -> None:
    reading = None if is_leaf(module) else read(module)
    if reading is not None and any(isinstance(part, PackedLayer) for part in reading.modules):
        use_blocked_norms(reading)
        choice = choose(reading.graph, module)
        if choice.time <= 1:
            module.forward = BlockedForward(module, choice, dtype)
            for layer in reading.modules:
                if isinstance(layer, PackedLayer):
                    layer.in_blocks = True
    elif not is_leaf(module):
        for child in module.children():
            _add_shortcuts(child, dtype)


def use_blocked_norms(reading: Reading) -> None:
    """Let torch's norms take blocked activations as well; they stay the same objects."""
    for module in reading.modules:
        if type(module) in BLOCKED_NORMS:
            BlockedBatchNorm.from_torch(cast(_BatchNorm, module))


class BlockedForward(Shortcut):
    """The forward of a packed model, with activations in the blocked layout from layer to layer.

    Args:
        module: The module.
        choice: Layers that run dense, on plain tensors, and the estimated time. They are those of the model when it is
            packed, so that a run whose density changes computes the same numbers if it is stopped and resumed.
        dtype: Type of the blocked activations. In bfloat16 the shortcut also runs under autocast.
    """

    def __init__(self, module: nn.Module, choice: Choice, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(module)
        self._choice, self.dtype = choice, dtype
        self.runs_in_autocast = dtype is torch.bfloat16

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self._choice, self.dtype)

    def pays(self, x: Tensor) -> bool:
        """Blocks are padded to 16 images, 32 in bfloat16, which may cost more than the layout saves."""
        images = x.shape[0]
        return self._choice.pays(images, math.prod(x.shape[2:]), padding(images, lanes(self._stored(images))))

    def _stored(self, images: int) -> torch.dtype:
        """Type of the activations of a batch: half of a block of bfloat16 is padding if float32 needs one block too."""
        return torch.float32 if images <= LANES else self.dtype

    def compile(self, reading: Reading, tokens: frozenset[str], exact: bool = False) -> Run:
        in_float32 = self._compile(reading, tokens, torch.float32, exact)
        if exact or self.dtype is torch.float32:
            return in_float32
        runs = {torch.float32: in_float32, self.dtype: self._compile(reading, tokens, self.dtype)}
        return lambda module, x: runs[self._stored(x.shape[0])](module, x)

    def _compile(self, reading: Reading, tokens: frozenset[str], dtype: torch.dtype, exact: bool = False) -> Run:
        graph = blocked_graph(reading.graph, self.module, tokens | self._choice.dense, dtype)
        if self.dtype is torch.bfloat16 and not exact:
            replace_calls(graph)
        return type(fx.GraphModule(self.module, graph)).forward  # a function of the module, which it does not keep


def packed_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of activations for which a model was packed; float32 if nothing in it runs in bfloat16."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    blocked = any(isinstance(forward, BlockedForward) and forward.dtype is torch.bfloat16 for forward in forwards)
    return torch.bfloat16 if blocked or has_bf16_attention(model) else torch.float32


def blocked_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that run in the blocked layout as a whole; "" is the model itself."""
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), BlockedForward)]


def unpack(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state_dict of the model before packing, with its usual keys, and the masks by parameter name.

    Args:
        model: A packed model.
    """
    require_model("unpack(model)", model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLayer)}
    state: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        owner, _, leaf = key.rpartition(".")
        if owner not in layers or leaf not in ("values", "index"):
            state[key] = tensor
        elif leaf == "values":
            name = weight_name(owner, layers[owner])
            state[name] = layers[owner].weight.detach()
            masks[name] = layers[owner].mask
    return state, masks


def describe(model: nn.Module) -> dict[str, str]:
    """Return how each packed layer runs, by name: `sparse`, or `dense` with the reason.

    Args:
        model: A packed model.
    """
    require_model("describe(model)", model)
    return {name: layer.how() for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}


def report(model: nn.Module) -> str:
    """Return a table of the layers: their module, shape of the weight, sparsity, and how they run.

    Layers that are not packed have a row if they have a weight of two or more dimensions.

    Args:
        model: A packed model.
    """
    require_model("report(model)", model)
    rows = [("module", "shape", "sparsity", "runs")]
    users: dict[int, list[str]] = {}  # names of the modules that have a weight, by its id
    for name, weight in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(weight), []).append(name.rpartition(".")[0])
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLayer):
            shape = "x".join(map(str, layer.weight_shape))
            rows.append((name, shape, f"{100 * (1 - layer.density):.2f} %", layer.how()))
        elif weights := _matrices(layer):
            others = [user for weight in weights.values() for user in users[id(weight)] if user != name]
            rows.append(_dense_row(name or next(iter(weights)), layer, [*weights.values()], others))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {sparsity:>{widths[2]}}  {runs}"
        for name, shape, sparsity, runs in rows
    )
    return "\n".join(lines)


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module of two or more dimensions, without norms, biases and other numbers by channel."""
    named = [] if isinstance(module, nn.LayerNorm | nn.RMSNorm) else module.named_parameters(recurse=False)
    matrices = {name: w for name, w in named if w.dim() > 1 and w.numel() and not name.startswith("bias")}
    return {name: w for name, w in matrices.items() if name == "weight" or w.numel() > max(w.shape)}


def _dense_row(name: str, module: nn.Module, weights: list[Tensor], others: list[str]) -> tuple[str, str, str, str]:
    """The row of a module with weights that are not packed, in the table of `report`.

    Args:
        name: The name of the module.
        module: The module.
        weights: Its weights.
        others: Names of other modules that have one of these weights.
    """
    shape = "x".join(map(str, weights[0].shape)) if len(weights) == 1 else f"{len(weights)} weights"
    zeros = sum(weight.numel() - int(weight.count_nonzero()) for weight in weights)
    if others:
        why = f'its weight is also that of "{others[0]}"'
    elif isinstance(module, nn.RNNBase):
        why = f"{type(module).__name__} layers are not packed"
    elif isinstance(module, ParametrizationList):
        name, why = name.partition(".parametrizations.")[0], "a parametrization computes its weight"
    else:
        why = "no mask"
    return name, shape, f"{100 * zeros / sum(weight.numel() for weight in weights):.2f} %", f"dense: {why}"


def warn_about_other(model: nn.Module, stacklevel: int) -> None:
    """Warn about packed layers that have no sparse kernel."""
    found = [f'"{name}" ({m.reason})' for name, m in model.named_modules() if isinstance(m, PackedOther)]
    if found:
        more = f" and {len(found) - 3} more" if found[3:] else ""
        warnings.warn(f"layers that compute with dense weights: {', '.join(found[:3])}{more}", stacklevel=stacklevel)


def pack_layer(
    model: nn.Module, name: str, mask: Tensor, final: int | None = None, memory: Tensor | None = None
) -> PackedLayer:
    """Replace the layer of the weight `name`, which can be packed, by its packed form, in place, and return it.

    A layer without a sparse kernel is packed too, and computes with the dense weight.

    Args:
        model: The model.
        name: The weight, such as `features.0.weight`.
        mask: Its active entries.
        final: As in `PackedLayer`.
        memory: As in `PackedLayer`.
    """
    path, _, leaf = name.rpartition(".")
    parent_path, _, attribute = path.rpartition(".")
    layer = model.get_submodule(path)
    require_values(name, cast(Tensor, getattr(layer, leaf)))
    parent = model.get_submodule(parent_path)
    if isinstance(layer, nn.MultiheadAttention):
        return PackedAttention.from_torch(layer).pack(leaf, mask, final, memory)
    if isinstance(parent, nn.MultiheadAttention):
        PackedAttention.from_torch(parent)
    replacement = packed(layer, mask, final, memory)
    if replacement is None:
        replacement = PackedOther(layer, str(no_kernel(layer)), mask, final, memory)
    keep_others(replacement, layer)
    vars(replacement).update({key: value for key, value in vars(layer).items() if "ward_" in key and "hook" in key})
    setattr(parent, attribute, replacement.train(layer.training))
    return replacement


def keep_others(replacement: PackedLayer, layer: nn.Module) -> None:
    """Give a packed layer the parameters of the layer other than weight and bias, such as a gain by channel."""
    for name, parameter in layer.named_parameters(recurse=False):
        if name not in ("weight", "bias"):
            if hasattr(replacement, name):
                raise UserError(f'packed layers have another "{name}" than a {type(layer).__name__}; rename it')
            replacement.register_parameter(name, parameter)


def cannot_pack(model: nn.Module, name: str) -> str | None:
    """Return why a weight of a model, given by its name, cannot be packed; `None` if it can."""
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    if not path:
        return "a single layer cannot be replaced in place; wrap it in nn.Sequential"
    if is_attention(layer) and leaf in PROJECTIONS:
        return None
    weight = layer._parameters.get(leaf)
    if leaf == "weight" and weight is None and hasattr(layer, leaf):
        return "a hook computes it at every call"
    if leaf != "weight" or weight is None or weight.dim() < 2:
        return f"it is not the matrix of weights of a {type(layer).__name__}"
    inside = [key for key, _ in layer.named_parameters() if "." in key]
    if (reason := no_kernel(layer)) and inside:
        return f'{reason}, and it has a parameter inside another module, "{inside[0]}"'
    return None


def check_packable(model: nn.Module, names: Iterable[str], excluded: Sequence[str | type[nn.Module]] = ()) -> None:
    """Refuse a model with weights that cannot be packed, and say how to leave out all of them.

    Args:
        model: The model.
        names: The weights to pack.
        excluded: What the algorithm excludes already.

    Raises:
        UserError: If a weight cannot be packed, or the model has no such layer.
    """
    names = list(names)
    why: dict[str, str] = {}  # by what leaves the weight out
    for name in names:
        path = name.rpartition(".")[0]
        try:
            model.get_submodule(path)
        except AttributeError:
            raise UserError(f'the model has no layer for the mask "{name}"') from None
        if (obstacle := cannot_pack(model, name)) is not None:
            others = [other for other in names if other.rpartition(".")[0] == path and not cannot_pack(model, other)]
            why.setdefault(name if others or not path else path, f'"{name}": {obstacle}')
        elif (tied := tied_parameters(model, path)) is not None:
            why.setdefault(tied[0], f"the model: {tied[1]}")
    if why:
        out = [s.__name__ if isinstance(s, type) else f'"{s}"' for s in dict.fromkeys([*excluded, *why])]
        reasons, many = list(why.values()), len(why) > 1
        more = f"; and {len(reasons) - 3} more" if reasons[3:] else ""
        raise UserError(
            f"cannot pack {'; '.join(reasons[:3])}{more}; leave {'them' if many else 'it'} out with "
            f"exclude=({', '.join(out)}{'' if len(out) > 1 else ','}) or no mask, or use masked storage"
        )


def tied_parameters(model: nn.Module, path: str) -> tuple[str, str] | None:
    """Return what leaves out a layer with tied parameters, and why it cannot be packed; `None` if none is tied.

    The packed copy of a tied parameter would be trained separately.
    """
    everywhere = list(model.named_parameters(remove_duplicate=False))
    for leaf, mine in model.get_submodule(path).named_parameters(recurse=False):
        names = [name for name, other in everywhere if other is mine]
        if len(names) > 1:
            # a topology lists a tied weight under its first name
            owner = names[0].rpartition(".")[0] if leaf == "weight" else path
            return owner, f'"{names[0]}" and "{names[1]}" are one tensor, and packing would separate them'
    return None
