"""Which weights of a model may be sparse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter

from equipoise.errors import UserError

Selector = str | type[nn.Module]

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


def select(
    model: nn.Module,
    include: Sequence[Selector] = (),
    exclude: Sequence[Selector] = (),
    dense_first: bool = False,
    dense_last: bool = False,
) -> dict[str, nn.Parameter]:
    """The weights to make sparse, by parameter name, in the model's order.

    By default every weight of `DEFAULT_TYPES`; never a bias, a norm or an embedding (nor a weight tied to one),
    and nothing frozen.
    `include` and `exclude` hold glob patterns over parameter or module names (``"layer4.*"``) and module types;
    `include` replaces the default types. `dense_first` and `dense_last` leave the first and last of them dense.
    """
    model = unwrap(model)
    known = [*_candidates(model)]
    _check_selectors(known, [*include, *exclude])
    wanted: Sequence[Selector] = include or DEFAULT_TYPES
    chosen = {
        name: weight
        for name, module, weight in known
        if _matches(name, module, wanted) and not _matches(name, module, exclude)
    }
    if any(isinstance(weight, UninitializedParameter) for weight in chosen.values()):
        raise UserError("the model has lazy layers without shapes; run one batch through it before attaching")
    names = list(chosen)
    for drop, at in ((dense_first, 0), (dense_last, -1)):
        if drop and names:
            chosen.pop(names[at], None)
    if not chosen:
        raise UserError("no weight of the model is chosen to be sparse; widen include or narrow exclude")
    return chosen


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
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
                yield f"{prefix}.{name}" if prefix else name, module, weight


def _matches(name: str, module: nn.Module, selectors: Sequence[Selector]) -> bool:
    owner = name.rpartition(".")[0]
    return any(
        fnmatchcase(name, s) or fnmatchcase(owner, s) if isinstance(s, str) else isinstance(module, s)
        for s in selectors
    )


def _check_selectors(known: list[tuple[str, nn.Module, nn.Parameter]], selectors: list[Selector]) -> None:
    """A pattern that matches nothing is a typing error that would silently change the experiment."""
    for selector in selectors:
        if isinstance(selector, str) and not any(_matches(name, module, [selector]) for name, module, _ in known):
            some = ", ".join(name for name, *_ in known[:3])
            raise UserError(f'"{selector}" matches no weight that can be sparse; weights are called {some}, ...')
