"""Let the attention of a packed model compute with bf16 operands.

`F.scaled_dot_product_attention` may be called anywhere in the code of a module. The forward of such a module is
replaced, on this module only, by one that runs the original and answers these calls (`TorchFunctionMode`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from equipoise.kernels.attention import attention

NAME = F.scaled_dot_product_attention.__name__
# Where products in bf16 are faster than torch's kernel in float32, measured on one core with AVX512-BF16
LEAST_TOKENS = 64
LEAST_PRODUCTS = 1 << 22  # of numbers, in one of the two products of matrices
MOST_KEYS = 1024  # the backward pass keeps queries x keys numbers for each head


def has_fast_bf16() -> bool:
    """Return whether torch multiplies bf16 matrices by instructions for them (AVX512-BF16)."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


has_fast_bf16._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in kernels/library.py


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch's function with bf16 operands if it is faster, and by torch otherwise."""
    usual = not (dropout_p or enable_gqa or (is_causal and attn_mask is not None))
    if usual and _pays(query, key, value) and _is_constant(attn_mask, query, key):
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return attention(query, key, value, attn_mask, is_causal, factor)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _pays(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether bf16 is faster for these shapes, and the operator takes them."""
    if torch.is_autocast_enabled("cpu") or q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim():
        return False
    if any(x.dtype != torch.float32 or x.device.type != "cpu" for x in (q, k, v)):
        return False
    (*lead, queries, channels), keys = q.shape, k.shape[-2]
    if k.shape != (*lead, keys, channels) or v.shape[:-1] != (*lead, keys):
        return False
    return queries >= LEAST_TOKENS and LEAST_TOKENS <= keys <= MOST_KEYS and q.numel() * keys >= LEAST_PRODUCTS


def _is_constant(mask: Tensor | None, q: Tensor, k: Tensor) -> bool:
    """Whether a mask is one that torch takes, of matrices that broadcast to the scores, and needs no gradient."""
    if mask is None:
        return True
    if mask.requires_grad or mask.dtype not in (torch.bool, torch.float32) or mask.device != q.device:
        return False
    sizes = zip(mask.shape[::-1], (*q.shape[:-1], k.shape[-2])[::-1], strict=False)
    return 2 <= mask.dim() <= q.dim() and all(mine in (1, theirs) for mine, theirs in sizes)


class _Answers(TorchFunctionMode):
    """Answers calls of torch's attention."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            function = scaled_dot_product_attention
        elif function is Tensor.unflatten:  # whose `super()` torch.compile does not follow inside of a mode
            function = torch.unflatten
        return function(*args, **(kwargs or {}))


class Bf16Attention:
    """The forward of a module, with attention in bf16 if it is faster.

    Args:
        module: The module. Assign the object to its attribute `forward`.
    """

    computes_the_same = True  # for readers of the module's source

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original = types.MethodType(type(module).forward, module)
        functools.update_wrapper(self, self.original)
        self.__code__ = getattr(type(module).forward, "__code__", None)  # torch.export reads where it is defined

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # an exported program may run on another machine
        if torch.compiler.is_exporting() or not has_fast_bf16():
            return self.original(*args, **kwargs)
        with _Answers():
            return self.original(*args, **kwargs)


def use_bf16_attention(model: nn.Module) -> None:
    """Replace the forwards of those modules of a model whose code calls torch's attention."""
    kinds = {kind for kind in set(map(type, model.modules())) if calls_attention(kind)}
    for module in model.modules():
        if type(module) in kinds and "forward" not in vars(module):
            module.forward = Bf16Attention(module)


def has_bf16_attention(model: nn.Module) -> bool:
    """Return whether a module of a model has such a forward."""
    return any(isinstance(vars(module).get("forward"), Bf16Attention) for module in model.modules())


def replace_calls(graph: fx.Graph) -> None:
    """Let a graph of a forward compute attention in bf16, if it is faster."""
    for node in graph.nodes:
        if node.target is F.scaled_dot_product_attention and has_fast_bf16():
            node.target = scaled_dot_product_attention


def calls_attention(kind: type[nn.Module]) -> bool:
    """Return whether the forward of a class names torch's attention, or methods and functions that it names do.

    A forward with a checkpoint does not count: the backward pass runs a part of it again, on its own.
    """
    if issubclass(kind, nn.MultiheadAttention):
        return True
    names: set[str] = set()
    known: set[FunctionType] = set()
    rest: list[Any] = [kind.forward]
    while rest:
        function = _plain_function(rest.pop())
        if function is not None and function not in known:
            known.add(function)
            mine = set(_names(function.__code__))
            names |= mine
            for name in mine:
                for value in (function.__globals__.get(name), getattr(kind, name, None)):
                    rest += _functions(value)
    return NAME in names and "checkpoint" not in names


def _plain_function(value: Any) -> FunctionType | None:
    """A function without its decorators, unless it is one of torch."""
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    ours = isinstance(value, FunctionType) and not str(value.__module__).startswith("torch.")
    return value if ours else None


def _functions(value: Any) -> Iterable[Any]:
    """The entries of a table of implementations, or the value. Subclasses of dict may import what is looked up."""
    if type(value) is dict or (isinstance(value, MutableMapping) and not isinstance(value, dict)):
        return value.values()
    return (value,)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function and in those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
