"""Which weights of a model may be sparse."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from equipoise.errors import UserError
from equipoise.modules import transformers_conv1d

Selector = str | type[nn.Module]
Candidate = tuple[str, tuple[nn.Module, ...], nn.Parameter]  # name, enclosing modules (owner last), weight

DEFAULT_TYPES: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
)
# Excluded by type: matching on the number of dimensions would also find embeddings and some norms.
NEVER_TYPES: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.Embedding,
    nn.EmbeddingBag,
)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, DataParallel and DistributedDataParallel wrappers."""
    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def as_selectors(given: Selector | Sequence[Selector]) -> tuple[Selector, ...]:
    """Return selectors as a tuple; a single string or type is one selector."""
    return (given,) if isinstance(given, str | type) else tuple(given)


def select(
    model: nn.Module,
    include: Selector | Sequence[Selector] = (),
    exclude: Selector | Sequence[Selector] = (),
    dense_first: bool = False,
    dense_last: bool = False,
) -> dict[str, nn.Parameter]:
    """Return the weights to make sparse, by parameter name, in the order of the model.

    The default is every weight of `DEFAULT_TYPES` and of the `Conv1D` layers of transformers. Biases, gains by
    channel, norms, embeddings, weights tied to them and frozen weights are never selected. A parametrized weight is
    not a parameter and stays dense, with a warning.

    Args:
        model: The model.
        include: Glob patterns over parameter or module names (``"layer4.*"``) and module types, which select every
            weight inside a module of that type; replaces the default types.
        exclude: Patterns and types of weights that stay dense.
        dense_first: Whether the first selected weight stays dense.
        dense_last: Whether the last selected weight stays dense.

    Raises:
        UserError: If nothing is selected, a pattern matches nothing, a layer is lazy, or a layer has weight
            normalisation, which divides by the norm of a row that may be empty.
    """
    model = unwrap(model)
    include, exclude = as_selectors(include), as_selectors(exclude)
    known = [*_candidates(model)]
    _check_selectors(known, [*include, *exclude])
    types = DEFAULT_TYPES + transformers_conv1d()

    def wanted(name: str, inside: tuple[nn.Module, ...]) -> bool:
        fits = _matches(name, inside, include) if include else isinstance(inside[-1], types)
        return fits and not _matches(name, inside, exclude)

    taken = [(name, inside, weight) for name, inside, weight in known if wanted(name, inside)]
    chosen = {name: weight for name, _, weight in taken}
    _refuse_weight_norm(taken)
    reached = {id(module) for _, inside, _ in taken for module in inside}
    hidden = [name for name, inside in _parametrized(model) if wanted(name, inside) and id(inside[-1]) not in reached]
    _warn_about_parametrized(hidden)
    if any(isinstance(weight, UninitializedParameter) for weight in chosen.values()):
        raise UserError("the model has lazy layers without shapes; run one batch through it before attaching")
    names = list(chosen)
    for drop, at in ((dense_first, 0), (dense_last, -1)):
        if drop and names:
            chosen.pop(names[at], None)
    if not chosen:
        raise UserError(_nothing_chosen(model, include or types, types))
    return chosen


def _nothing_chosen(model: nn.Module, wanted: Sequence[Selector], types: tuple[type[nn.Module], ...]) -> str:
    """Say which layers were looked for and which layers the model has."""
    looked = ", ".join(f'"{selector}"' if isinstance(selector, str) else selector.__name__ for selector in wanted)
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    counts = Counter((type(module).__name__, isinstance(module, types)) for module in owners)
    found = ", ".join(
        f"{count} {name}" + (" (frozen, excluded, kept dense or tied to an embedding)" if known else "")
        for (name, known), count in counts.items()
    )
    return (
        f"no weight of the model is chosen to be sparse: looked for {looked}; found {found or 'no parameters'}; "
        'name weights of other layers with include, such as include="layers.*"'
    )


def _candidates(model: nn.Module) -> Iterator[Candidate]:
    """Yield every trainable weight of two or more dimensions outside norms and embeddings; tied weights once."""
    refused = {
        id(weight)
        for module in model.modules()
        if isinstance(module, NEVER_TYPES)
        for weight in module.parameters(recurse=False)
    }
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if name.startswith("bias") or name.endswith("_bias") or id(weight) in refused:
                continue
            if not weight.requires_grad or _is_gain(module, name, weight):
                continue
            if isinstance(weight, UninitializedParameter) or (weight.dim() >= 2 and weight.numel()):
                refused.add(id(weight))
                yield f"{prefix}.{name}" if prefix else name, _path(model, prefix), weight


def _is_gain(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter scales the weight of its layer by channel, such as the `gain` of timm's ScaledStdConv2d."""
    return (
        name != "weight"
        and module._parameters.get("weight") is not None
        and not isinstance(parameter, UninitializedParameter)
        and parameter.numel() == max(parameter.shape, default=1)
    )


def _parametrized(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield the name of every trainable weight that is computed from others, and its enclosing modules."""
    for prefix, module in model.named_modules():
        for name, parts in module.parametrizations.items() if is_parametrized(module) else ():
            if any(p.requires_grad and p.dim() >= 2 for p in parts.parameters()):
                yield f"{prefix}.{name}" if prefix else name, _path(model, prefix)


def _warn_about_parametrized(names: list[str]) -> None:
    """Warn about selected weights that stay dense."""
    if names:
        listed = ", ".join(f'"{name}"' for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        warnings.warn(
            f"parametrized weights stay dense: {listed}; "
            "remove them with torch.nn.utils.parametrize.remove_parametrizations to make these weights sparse",
            stacklevel=7,  # the caller of attach()
        )


def _refuse_weight_norm(taken: list[Candidate]) -> None:
    """Refuse weight_norm: g·v/|v| is 0/0 for a row of v without active weights."""
    for name, inside, _ in taken:
        owner, _, leaf = name.rpartition(".")
        hooks = [hook for hook in inside[-1]._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        old = any(leaf in (f"{hook.name}_g", f"{hook.name}_v") for hook in hooks)
        new = isinstance(inside[-1], ParametrizationList) and any(
            isinstance(part, parametrizations._WeightNorm) for part in inside[-1]
        )
        if old or new:
            raise UserError(
                f'"{owner}" has weight_norm, which gives NaN for a row without active weights; '
                f'remove it, or leave the layer dense with exclude="{owner or name}"'
            )


def _path(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """Return the modules from the model to the module of this name, both included."""
    path = [model]
    for part in name.split(".") if name else ():
        path.append(path[-1].get_submodule(part))
    return tuple(path)


def _matches(name: str, inside: tuple[nn.Module, ...], selectors: Sequence[Selector]) -> bool:
    owner = name.rpartition(".")[0]
    return any(
        fnmatchcase(name, s) or fnmatchcase(owner, s)
        if isinstance(s, str)
        else any(isinstance(module, s) for module in inside)
        for s in selectors
    )


def _check_selectors(known: list[Candidate], selectors: list[Selector]) -> None:
    """Refuse a pattern that matches nothing: a typing error would silently change the experiment."""
    for selector in selectors:
        if isinstance(selector, str) and not any(_matches(name, inside, [selector]) for name, inside, _ in known):
            some = ", ".join(name for name, *_ in known[:3])
            raise UserError(f'"{selector}" matches no weight that can be sparse; names are {some}, ...')
