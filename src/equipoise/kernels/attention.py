"""Attention with bf16 operands, as a PyTorch operator in the namespace `equipoise`.

The products run on bf16 matrices and add up in float32; scores and probabilities are rounded to bf16 between them, and
the softmax computes in float32. Input and output are float32. It is an operator, and not a sequence of calls, so that
compiled code runs it as eager code does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 20  # scores computed at a time, so that they are still in a cache of the core when they are read

_operators = torch.library.Library("equipoise", "FRAGMENT")
_operators.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_operators.define(
    "attention_grad(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor probabilities, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Compute `softmax(scale * q @ k.T + bias) @ v` with bf16 operands.

    The backward pass keeps the probabilities, in bf16: queries x keys numbers for each head. In rows without a key, all
    of whose biases are minus infinity, the output is zero, as that of torch.

    Args:
        q: Queries, float32, of the shape (batch, heads, queries, channels) or (batch, queries, channels).
        k: Keys, with the same leading dimensions and channels.
        v: Values, with the leading dimensions and the number of `k`.
        bias: A constant that is added to the scores, to which it broadcasts; bool masks are `True` for keys that count.
        causal: Whether query `i` sees the keys up to `i` only. There is no bias then.
        scale: Factor of the scores.
    """
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return torch.ops.equipoise.attention.default(q, k, v, bias, causal, scale, keep)[0]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, keep: bool
) -> tuple[Tensor, ...]:
    added, without_key = _as_scores(bias, causal, (*q.shape[:-1], k.shape[-2]))
    out = _output(q, v)
    q, k, v = (_as_matrices(x) for x in (q, k, v))
    mixed = q.new_empty(len(q), q.shape[1], v.shape[2])
    kept = q.new_empty(len(q) if keep else 0, q.shape[1], k.shape[1])
    parts = _parts(len(q), q.shape[1] * k.shape[1])
    buffers = q.new_empty(1 if keep else 2, len(q[parts[0]]), q.shape[1], k.shape[1])
    for part in parts:
        size = len(q[part])
        scores, weight = buffers[0, :size], int(added.dim() > 0)
        torch.baddbmm(_of(added, part), q[part], k[part].mT, beta=weight, alpha=scale, out=scores)
        probabilities = torch.softmax(scores, -1, out=kept[part] if keep else buffers[1, :size])
        if without_key is not None:
            probabilities.masked_fill_(_of(without_key, part), 0.0)
        torch.bmm(probabilities, v[part], out=mixed[part])
    out.copy_(mixed.view(out.shape))
    return out, *((q, k, v) if keep else (q.new_empty(0) for _ in range(3))), kept


def _output(q: Tensor, v: Tensor) -> Tensor:
    """An output laid out as the queries: like torch's, so that code after it may call `view`."""
    *lead, queries, _ = q.shape
    if q.dim() == 4 and q.stride(1) < q.stride(2):  # the heads of a token lie side by side
        return q.new_empty(lead[0], queries, lead[1], v.shape[-1]).transpose(1, 2)
    return q.new_empty(*lead, queries, v.shape[-1])


def _as_matrices(x: Tensor) -> Tensor:
    """The matrices of all heads one after another, in bf16."""
    return x.to(torch.bfloat16, memory_format=torch.contiguous_format).flatten(0, -3)


def _as_scores(bias: Tensor | None, causal: bool, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """What is added to the scores of this shape, in bf16, and the queries for which it leaves no key, if any.

    Both are one matrix, or one for each head; nothing to add is a number.
    """
    if causal:
        return torch.full(shape[-2:], -torch.inf, dtype=torch.bfloat16).triu_(1), None
    if bias is None:
        return torch.zeros((), dtype=torch.bfloat16), None
    if bias.dtype == torch.bool:
        added = torch.zeros_like(bias, dtype=torch.bfloat16).masked_fill_(~bias, -torch.inf)
    else:
        # Masks may have the least float32 instead of infinity, so that keys of a row of it alone count equally.
        added = bias.clamp(min=torch.finfo(torch.bfloat16).min).to(torch.bfloat16)
        added.masked_fill_(bias == -torch.inf, -torch.inf)
    rows = (added == -torch.inf).all(-1, keepdim=True)
    return _per_head(added, shape), _per_head(rows, (*shape[:-1], 1)) if rows.any() else None


def _per_head(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One matrix if all heads have the same, and otherwise one for each head."""
    return x.reshape(x.shape[-2:]) if x.shape[:-2].numel() == 1 else x.expand(shape).flatten(0, -3)


def _of(x: Tensor, part: slice) -> Tensor:
    """The matrices for some of the heads."""
    return x[part] if x.dim() == 3 else x


def _parts(matrices: int, size: int) -> list[slice]:
    """Ranges of matrices with at most `CHUNK` numbers together, or of one matrix."""
    step = max(1, CHUNK // size)
    return [slice(start, min(matrices, start + step)) for start in range(0, matrices, step)]


def _grad(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lead = dy.shape[:-2]
    dy = _as_matrices(dy)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    parts, zero = _parts(len(q), q.shape[1] * k.shape[1]), q.new_zeros(())
    buffers = q.new_empty(2, len(q[parts[0]]), q.shape[1], k.shape[1])
    for part in parts:
        of_part = probabilities[part]
        gradient, dscores = buffers[:, : len(of_part)]
        torch.bmm(of_part.mT, dy[part], out=dv[part])
        torch.bmm(dy[part], v[part].mT, out=gradient)
        torch._softmax_backward_data(gradient, of_part, -1, torch.bfloat16, grad_input=dscores)
        torch.baddbmm(zero, dscores, k[part], beta=0, alpha=scale, out=dq[part])
        torch.baddbmm(zero, dscores.mT, q[part], beta=0, alpha=scale, out=dk[part])
    return tuple(x.float().unflatten(0, lead) for x in (dq, dk, dv))


def _fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, keep: bool
) -> tuple[Tensor, ...]:
    heads = q.shape[:-2].numel()
    kept = q.new_empty(heads if keep else 0, q.shape[-2], k.shape[-2], dtype=torch.bfloat16)
    saved = (x.new_empty((heads, *x.shape[-2:]) if keep else 0, dtype=torch.bfloat16) for x in (q, k, v))
    return _output(q, v), *saved, kept


def _fake_grad(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lead = dy.shape[:-2]
    return tuple(dy.new_empty(*lead, *x.shape[-2:]) for x in (q, k, v))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.scale = inputs[5]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of the tensors that are kept


@once_differentiable
def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.equipoise.attention_grad.default(dy, *ctx.saved_tensors, ctx.scale)
    wanted = (x if needs_grad else None for x, needs_grad in zip(found, ctx.needs_input_grad, strict=False))
    return *wanted, None, None, None, None


for _name, _function, _shapes in (("attention", _attention, _fake), ("attention_grad", _grad, _fake_grad)):
    _operators.impl(_name, _function, "CPU")
    torch.library.register_fake(f"equipoise::{_name}", _shapes, lib=_operators)
torch.library.register_autograd("equipoise::attention", _backward, setup_context=_save, lib=_operators)
