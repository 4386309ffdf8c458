"""Sparse linear layers on row-major vectors, against dense PyTorch in float64, and as operators of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.kernels.linear import linear

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())

sizes = st.one_of(st.integers(1, 40), st.sampled_from([8, 64, 200]))


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def layer(
    inputs: int, outputs: int, density: float, lead: tuple[int, ...] = (7,), seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, sparse weight and bias in float64, and the indices of active weights."""
    torch.manual_seed(seed)
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    mask = torch.rand(outputs, inputs) < density
    x, bias = torch.randn(*lead, inputs, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64)
    return x, weight * mask, bias, mask.flatten().nonzero().flatten().int()


def close(mine: Tensor | None, exact: Tensor | None, terms: int) -> None:
    """float32 error of a sum of `terms` products of standard normal numbers, with room."""
    assert mine is not None
    assert exact is not None
    torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5 * (1 + terms) ** 0.5)


@settings(max_examples=60, deadline=None)
@given(
    sizes,
    sizes,
    st.sampled_from([(), (0,), (1,), (5,), (16,), (130,), (3, 7), (2, 3, 40)]),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 999),
)
def test_outputs_and_gradients(
    inputs: int, outputs: int, lead: tuple[int, ...], density: float, biased: bool, threads: int, seed: int
) -> None:
    x, weight, bias, index = layer(inputs, outputs, density, lead, seed)
    xd, wd, bd = leaf(x), leaf(weight), leaf(bias)
    exact = F.linear(xd, wd, bd if biased else None)
    dy = torch.randn_like(exact)
    exact.backward(dy)

    xs, values, bs = leaf(x.float()), leaf(weight.flatten()[index.long()].float()), leaf(bias.float())
    probe = torch.zeros(outputs, inputs, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "threads", lambda: threads)
        mine = linear(xs, values, bs if biased else None, index, (outputs, inputs), probe)
        mine.backward(dy.float())

    vectors = x[..., 0].numel()
    assert mine.shape == exact.shape
    close(mine, exact, inputs)
    close(xs.grad, xd.grad, outputs)
    assert wd.grad is not None
    close(values.grad, wd.grad.flatten()[index.long()], vectors)
    close(probe.grad, wd.grad, vectors)
    if biased:
        close(bs.grad, bd.grad, vectors)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t[:1].expand(3, -1, -1),
        lambda t: torch.cat([t, t])[3:],
    ],
    ids=["transposed", "strided", "expanded", "part"],
)
def test_inputs_and_gradients_with_any_strides(change: Callable[[Tensor], Tensor]) -> None:
    x, weight, bias, index = layer(20, 9, 0.3, (3, 5))
    values = weight.flatten()[index.long()].float()
    given, dy = leaf(x.float()), change(torch.randn(3, 5, 9))
    mine = linear(change(given), values, bias.float(), index, (9, 20))
    mine.backward(dy)
    exact_x = leaf(x)
    exact = F.linear(change(exact_x), weight, bias)
    exact.backward(dy.double())
    close(mine, exact, 20)
    close(given.grad, exact_x.grad, 20)


def step() -> list[Tensor]:
    x, weight, bias, index = layer(70, 50, 0.1, (3, 90))
    tensors = [leaf(t.float()) for t in (x, weight.flatten()[index.long()], bias)]
    out = linear(*tensors, index, (50, 70))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.usefixtures("restore_threads")
def test_same_bits_every_time_at_a_number_of_threads_and_nearly_so_at_any(threads: int) -> None:
    torch.set_num_threads(1)
    alone = step()
    torch.set_num_threads(threads)
    reference = step()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(), reference, strict=True))
    for one, other in zip(alone, reference, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_vector_stays_visible_and_changes_no_other(value: float) -> None:
    x, weight, bias, index = layer(10, 6, 1.0, (11,))
    x[4, 2] = value
    out = linear(x.float(), weight.flatten().float(), bias.float(), index, (6, 10))
    assert torch.equal(out.isfinite(), F.linear(x, weight, bias).isfinite())


def test_indices_that_change_in_place_are_read_again() -> None:
    x, index = torch.eye(4), torch.tensor([0, 5], dtype=torch.int32)
    values = torch.tensor([1.0, 2.0])
    for first in (0, 1, 2, 1, 0):
        index[0] = first
        expected = torch.zeros(16)
        expected[index.long()] = values
        assert torch.equal(linear(x, values, None, index, (4, 4)).T, expected.view(4, 4))


def call(**other: Tensor) -> Tensor:
    x, weight, bias, index = layer(12, 8, 0.5)
    tensors = {"x": x.float(), "values": weight.flatten()[index.long()].float(), "bias": bias.float(), "index": index}
    return linear(**{**tensors, **other}, shape=(8, 12))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"x": torch.ones(3, 12).double()}, "input: packed layers compute with float32 on cpu, not torch.float64"),
        ({"x": torch.ones(3, 12, device="meta")}, "input: .* on meta"),
        ({"x": torch.ones(3, 11)}, "the layer takes 12 channels, the input has 11"),
        ({"values": torch.ones(3)}, r"values has the shape \[3\]"),
        ({"values": torch.ones(3, device="meta")}, "values: .* on meta"),
        ({"values": torch.ones(3).half()}, "values: .* not torch.float16"),
        ({"bias": torch.ones(7)}, r"bias has the shape \[7\]; the layer needs \[8\]"),
        ({"bias": torch.ones(8, device="meta")}, "bias: .* on meta"),
        ({"index": torch.tensor([0, 96], dtype=torch.int32)}, "index has 96; the weight has 96 elements"),
        ({"index": torch.tensor([3, 3], dtype=torch.int32)}, "index must be ascending"),
        ({"index": torch.tensor([0, 1])}, "index: .* not torch.int64"),
    ],
)
def test_tensors_that_the_kernels_would_misread_are_refused(other: dict[str, Tensor], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        call(**other)
    assert "\n" not in str(raised.value)


def test_a_second_derivative_is_refused() -> None:
    x = torch.ones(3, 12, requires_grad=True)
    (first,) = torch.autograd.grad(call(x=x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# -- operators of PyTorch


@pytest.mark.parametrize(("lead", "biased"), [((5,), True), ((2, 3), False)])
def test_the_operators_are_registered_completely(lead: tuple[int, ...], biased: bool) -> None:
    x, weight, bias, index = layer(12, 8, 0.5, lead)
    tensors = [leaf(t.float()) for t in (x, weight.flatten()[index.long()], bias)]
    inputs, values = tensors[0].detach(), tensors[1].detach()
    dy, operators = torch.randn(*lead, 8), torch.ops.equipoise
    probe = torch.zeros(8, 12, requires_grad=True)
    third = tensors[2] if biased else None
    torch.library.opcheck(operators.linear.default, (*tensors[:2], third, probe, index, (8, 12)))
    torch.library.opcheck(operators.linear_input_grad.default, (dy, values, index, 12))
    for for_dx in (values, None):
        torch.library.opcheck(operators.linear_grad.default, (inputs, dy, for_dx, index))


def test_a_call_does_not_import_the_compiler() -> None:
    program = """
import sys, torch
from equipoise.kernels.linear import linear
values = torch.ones(2, requires_grad=True)
linear(torch.ones(3, 4), values, None, torch.arange(2, dtype=torch.int32), (5, 4)).sum().backward()
assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
