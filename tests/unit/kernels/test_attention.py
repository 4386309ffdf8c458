"""Attention with bf16 operands against attention written out in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.kernels import attention as module
from equipoise.kernels.attention import attention

ROUNDING = 2.0**-8  # largest relative error of rounding to bf16


def inputs(lead: tuple[int, ...], queries: int, keys: int, channels: int = 16, out: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (*lead, queries, channels), (*lead, keys, channels), (*lead, keys, out)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def exact_probabilities(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = scale * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.double()
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, scale: float = 0.25
) -> Tensor:
    """Check output and gradients; return the output."""
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    probabilities = exact_probabilities(exact[0], exact[1], bias, causal, scale)
    expected = probabilities @ exact[2]
    out = attention(q, k, v, bias, causal, scale)
    assert out.dtype == torch.float32
    # Operands and scores are rounded, then probabilities and output: errors of scores count twice, in a probability
    # and in the sum by which it is divided.
    largest = scale * (exact[0].abs() @ exact[1].abs().mT).max() + (0 if bias is None else 4)
    bound = ((6 * ROUNDING * largest).exp() - 1 + 3 * ROUNDING) * (probabilities @ exact[2].abs())
    assert ((out - expected).abs() <= bound).all()
    assert (out - expected).norm() <= 3 * ROUNDING * expected.norm()
    dy = torch.randn(out.shape)
    found = torch.autograd.grad(out, (q, k, v), dy)
    for mine, theirs in zip(found, torch.autograd.grad(expected, exact, dy.double()), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= 4 * ROUNDING * theirs.norm()
    return out


@pytest.mark.parametrize("chunk", [1, 2000, 1 << 20])
@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_output_and_gradients(lead: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    check(*inputs(lead, 24, 24), scale=0.3)


@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (5, 30), (30, 5)])
def test_causal(queries: int, keys: int) -> None:
    check(*inputs((2, 3), queries, keys), causal=True)


def test_another_number_of_channels_in_values() -> None:
    check(*inputs((2, 3), 9, 20, channels=8, out=12))


@pytest.mark.parametrize("shape", [(9, 20), (1, 20), (2, 1, 1, 20), (2, 3, 9, 20), (1, 3, 9, 20), (1, 1, 9, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("chunk", [400, 1 << 20])
def test_bias(shape: tuple[int, ...], kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    given = inputs((2, 3), 9, 20)
    bias = torch.randn(shape)
    check(*given, bias=bias > -1 if kind == "bool" else bias)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(9, 20), (2, 1, 9, 20), (2, 3, 9, 20)])
@pytest.mark.parametrize("chunk", [400, 1 << 20])
def test_rows_without_a_key_are_those_of_torch(
    kind: str, shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    q, k, v = inputs((2, 3), 9, 20)
    bias = torch.rand(shape) > 0.3
    bias[..., 4, :] = False
    given = bias if kind == "bool" else torch.zeros(shape).masked_fill(~bias, -torch.inf)
    out = check(q, k, v, given)
    theirs = F.scaled_dot_product_attention(q, k, v, given, scale=0.25)
    assert torch.equal(out[..., 4, :], torch.zeros_like(out[..., 4, :]))
    assert torch.equal(theirs[..., 4, :], torch.zeros_like(out[..., 4, :]))


def test_padding_of_a_whole_sequence() -> None:
    q, k, v = inputs((2, 3), 9, 20)
    bias = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 20)
    assert not check(q, k, v, bias)[1].any()


def test_masks_of_the_least_number() -> None:
    """A row of it alone has equal probabilities: the number is not minus infinity, though bf16 would round it there."""
    q, k, v = inputs((2, 3), 9, 20)
    bias = torch.zeros(9, 20).masked_fill(torch.rand(9, 20) > 0.5, torch.finfo(torch.float32).min)
    bias[4] = torch.finfo(torch.float32).min
    out, theirs = attention(q, k, v, bias, False, 0.25), F.scaled_dot_product_attention(q, k, v, bias, scale=0.25)
    assert torch.allclose(theirs[..., 4, :], v.mean(-2), atol=1e-5)
    assert (out - theirs).norm() <= 3 * ROUNDING * theirs.norm()


def test_nan_stays() -> None:
    q, k, v = inputs((2, 3), 9, 20)
    with torch.no_grad():
        q[0, 0, 2, 0] = torch.nan
    for bias in (None, torch.ones(9, 20, dtype=torch.bool)):
        out = attention(q, k, v, bias, False, 0.25)
        assert out[0, 0, 2].isnan().all()
        assert out.isnan().sum() == 16


def test_gradients_of_some_inputs() -> None:
    q, k, v = inputs((2, 3), 9, 20)
    every = torch.autograd.grad(attention(q, k, v, None, False, 0.25).square().sum(), (q, k, v))
    for at in range(3):
        given = [x.detach() for x in (q, k, v)]
        given[at].requires_grad_()
        out = attention(*given, None, False, 0.25)
        assert torch.equal(torch.autograd.grad(out.square().sum(), given[at])[0], every[at])


def test_output_lies_as_that_of_torch() -> None:
    q, k, v = inputs((2, 3), 9, 20)
    for given in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        theirs = F.scaled_dot_product_attention(given, k, v)
        assert attention(given, k, v, None, False, 0.25).stride() == theirs.stride()


def test_without_gradients_nothing_is_kept() -> None:
    q, k, v = inputs((2, 3), 9, 20)
    with torch.no_grad():
        out, *kept = torch.ops.equipoise.attention(q, k, v, None, False, 0.25, False)
    assert [x.numel() for x in kept] == [0, 0, 0, 0]
    assert torch.equal(out, attention(q, k, v, None, False, 0.25))


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_in_compiled_code(lead: tuple[int, ...], causal: bool) -> None:
    q, k, v = inputs(lead, 9, 9, out=12)
    bias = None if causal else torch.ones(9, 9, dtype=torch.bool)
    torch.library.opcheck(
        torch.ops.equipoise.attention.default,
        (q, k, v, bias, causal, 0.25, True),
        test_utils=["test_schema", "test_faketensor"],
    )
    _, *saved = torch.ops.equipoise.attention(q, k, v, bias, causal, 0.25, True)
    given = (torch.randn(*lead, 9, 12), *(x.detach() for x in saved), 0.25)
    torch.library.opcheck(
        torch.ops.equipoise.attention_grad.default, given, test_utils=["test_schema", "test_faketensor"]
    )


def test_all_threads_agree() -> None:
    q, k, v = inputs((4, 4), 64, 64)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = attention(q, k, v, None, True, 0.25)
            found.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(*found, strict=True))
