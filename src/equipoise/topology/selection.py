"""Which weights of a model may be sparse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from equipoise.errors import UserError

Selector = str | type[nn.Module]
Candidate = tuple[str, tuple[nn.Module, ...], nn.Parameter]  # name, the modules it is inside, its owner last, weight

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
# Peers have made norms and embeddings sparse by matching on the number of dimensions; we refuse by type.
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
    """The user's own module inside `torch.compile`, DataParallel and DistributedDataParallel."""
    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def as_selectors(given: Selector | Sequence[Selector]) -> tuple[Selector, ...]:
    """A single one may be given bare: `exclude="head"` is not h, e, a and d."""
    return (given,) if isinstance(given, str | type) else tuple(given)


def select(
    model: nn.Module,
    include: Selector | Sequence[Selector] = (),
    exclude: Selector | Sequence[Selector] = (),
    dense_first: bool = False,
    dense_last: bool = False,
) -> dict[str, nn.Parameter]:
    """The weights to make sparse, by parameter name, in the model's order.

    By default every weight of `DEFAULT_TYPES`; never a bias, a norm or an embedding (nor a weight tied to one),
    and nothing frozen.
    `include` and `exclude` hold glob patterns over parameter or module names (``"layer4.*"``) and module types, which
    mean every weight inside a module of that type; `include` replaces the default types. `dense_first` and
    `dense_last` leave the first and last of them dense. A parametrized weight is no parameter and stays dense, which
    a warning tells; weight normalisation divides by the norm of a row, which may be empty, and is refused.
    """
    model = unwrap(model)
    include, exclude = as_selectors(include), as_selectors(exclude)
    known = [*_candidates(model)]
    _check_selectors(known, [*include, *exclude])

    def wanted(name: str, inside: tuple[nn.Module, ...]) -> bool:
        fits = _matches(name, inside, include) if include else isinstance(inside[-1], DEFAULT_TYPES)
        return fits and not _matches(name, inside, exclude)

    taken = [(name, inside, weight) for name, inside, weight in known if wanted(name, inside)]
    chosen = {name: weight for name, _, weight in taken}
    _refuse_weight_norm(taken)
    reached = {id(module) for _, inside, _ in taken for module in inside}
    hidden = [name for name, inside in _parametrized(model) if wanted(name, inside) and id(inside[-1]) not in reached]
    _warn_of_parametrized(hidden)
    if any(isinstance(weight, UninitializedParameter) for weight in chosen.values()):
        raise UserError("the model has lazy layers without shapes; run one batch through it before attaching")
    names = list(chosen)
    for drop, at in ((dense_first, 0), (dense_last, -1)):
        if drop and names:
            chosen.pop(names[at], None)
    if not chosen:
        raise UserError("no weight of the model is chosen to be sparse; widen include or narrow exclude")
    return chosen


def _candidates(model: nn.Module) -> Iterator[Candidate]:
    """Every trainable weight of two or more dimensions that no norm and no embedding owns; a tied one once."""
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
            if not weight.requires_grad:
                continue
            if isinstance(weight, UninitializedParameter) or (weight.dim() >= 2 and weight.numel()):
                refused.add(id(weight))
                yield f"{prefix}.{name}" if prefix else name, _path(model, prefix), weight


def _parametrized(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Every trainable weight that is computed from others, by name, and the modules it is inside."""
    for prefix, module in model.named_modules():
        for name, parts in module.parametrizations.items() if is_parametrized(module) else ():
            if any(p.requires_grad and p.dim() >= 2 for p in parts.parameters()):
                yield f"{prefix}.{name}" if prefix else name, _path(model, prefix)


def _warn_of_parametrized(names: list[str]) -> None:
    """Whoever asks for a sparse model shall know what of it is not."""
    if names:
        listed = ", ".join(f'"{name}"' for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        warnings.warn(
            f"parametrized weights stay dense: {listed}; "
            "torch.nn.utils.parametrize.remove_parametrizations makes them plain again",
            stacklevel=7,  # whoever called attach()
        )


def _refuse_weight_norm(taken: list[Candidate]) -> None:
    """g·v/|v| of a row of v without an active weight is 0/0."""
    for name, inside, _ in taken:
        owner, _, leaf = name.rpartition(".")
        hooks = [hook for hook in inside[-1]._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        old = any(leaf in (f"{hook.name}_g", f"{hook.name}_v") for hook in hooks)
        new = isinstance(inside[-1], ParametrizationList) and any(
            isinstance(part, parametrizations._WeightNorm) for part in inside[-1]
        )
        if old or new:
            raise UserError(
                f'"{owner}" has weight_norm, which makes NaN of an empty row; '
                f'remove it, or leave the layer dense with exclude="{owner or name}"'
            )


def _path(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """The modules from the model to the one of this name, both included."""
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
    """A pattern that matches nothing is a typing error that would silently change the experiment."""
    for selector in selectors:
        if isinstance(selector, str) and not any(_matches(name, inside, [selector]) for name, inside, _ in known):
            some = ", ".join(name for name, *_ in known[:3])
            raise UserError(f'"{selector}" matches no weight that can be sparse; weights are called {some}, ...')
