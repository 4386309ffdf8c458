"""The boundary to C: tensors that the kernels would misread are refused in one line, or read correctly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise
from equipoise.errors import UserError
from equipoise.kernels import arena, boundary, library, operators
from equipoise.kernels.blocked import Blocked, fill_blocked, fill_plain, from_blocked, to_blocked
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.operators import BATCH, FIXED, Fused
from equipoise.kernels.taps import Pattern

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())
SHAPE = ConvShape(4, 3, (3, 3), padding=(1, 1))
INDEX = torch.arange(0, 108, 5)


def layer(
    values: Tensor | None = None, bias: Tensor | None = None, index: Tensor = INDEX, x: Tensor | None = None
) -> Tensor:
    images = torch.ones(2, 3, 5, 5) if x is None else x
    values = torch.ones(index.numel()) if values is None else values
    return from_blocked(operators.conv(to_blocked(images, (1, 1)), values, bias, Pattern(SHAPE, index)))


def norm(gamma: Tensor | None = None, running: tuple[Tensor, Tensor] | None = None, kind: int = BATCH) -> Tensor:
    x = torch.arange(2.0 * 4 * 3 * 3).view(2, 4, 3, 3)
    return from_blocked(operators.fused(to_blocked(x), Fused(kind, momentum=0.1), gamma, None, running))


def test_addresses_are_taken_in_few_modules() -> None:
    """The boundary takes those of tensors, planes.py and steps.py those of arrays. huge_pages.py aligns its memory."""
    root = Path(equipoise.__file__).parent

    def users(attribute: str) -> set[str]:
        return {path.relative_to(root).as_posix() for path in root.rglob("*.py") if attribute in path.read_text()}

    assert users("data_ptr") == {"kernels/boundary.py"}
    assert users("ctypes.data") == {"kernels/huge_pages.py", "kernels/planes.py", "kernels/steps.py"}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: layer(torch.ones(5)), r"values has the shape \[5\]; the layer needs \[22\]"),
        (lambda: layer(torch.ones(23)), r"values has the shape \[23\]; the layer needs \[22\]"),
        (lambda: layer(torch.ones(22).double()), r"values: packed layers compute with float32 on cpu.*\.float\(\)"),
        (lambda: layer(torch.ones(22).half()), "not torch.float16 on cpu"),
        (lambda: layer(torch.ones(22, device="meta")), "on meta"),
        (lambda: layer(bias=torch.ones(3)), r"bias has the shape \[3\]; the layer needs \[4\]"),
        (lambda: layer(bias=torch.ones(4).bfloat16()), "bias: packed layers compute with float32"),
        (lambda: layer(index=torch.tensor([0, 108])), "index has 108; the weight has 108 elements"),
        (lambda: layer(index=torch.tensor([-1, 3])), "index has -1; the weight has 108 elements"),
        (lambda: layer(index=torch.tensor([0, 2**40])), f"index has {2**40}; the weight has 108"),
        (lambda: layer(index=torch.tensor([3, 3])), "index must be ascending, without duplicates"),
        (lambda: layer(index=torch.tensor([4, 3])), "index must be ascending"),
        (lambda: layer(index=torch.tensor([0.0, 1.0])), "index must be a vector of int32 or int64"),
        (lambda: layer(index=torch.tensor([[0, 1]])), "index must be a vector"),
        (
            lambda: layer(x=torch.ones(2, 3, 5, 5).to_sparse()),
            "float32 on cpu, not torch.float32 on cpu .torch.sparse",
        ),
        (lambda: norm(torch.ones(3)), "weight of the norm has the shape"),
        (lambda: norm(torch.ones(4).half()), "weight of the norm: packed layers compute with float32"),
        (lambda: norm(running=(torch.zeros(4), torch.ones(2))), "running statistics has the shape"),
        (lambda: norm(running=(torch.zeros(4).double(), torch.ones(4))), "running statistics: packed layers"),
        (lambda: norm(kind=FIXED), "needs a running mean and variance"),
        (lambda: Blocked(torch.zeros(1, 2, 3, 3, 16), 17), "17 images do not fit"),
        (lambda: Blocked(torch.zeros(1, 2, 3, 16), 1), "1 images do not fit"),
        (lambda: fill_blocked(torch.zeros(1, 2, 3, 3, 16), torch.zeros(17, 2, 3, 3)), r"\[17, 2, 3, 3\] do not fit"),
        (lambda: fill_plain(torch.zeros(2, 3, 3, 3), torch.zeros(1, 2, 3, 3, 16)), "do not fit a blocked"),
        (lambda: fill_plain(torch.zeros(2, 2, 3, 3).double(), torch.zeros(1, 2, 3, 3, 16)), "images: packed layers"),
        (lambda: fill_plain(torch.zeros(2, 2, 3, 3), torch.zeros(1, 2, 3, 3, 8)), "5 dimensions, the last of 16"),
        (lambda: boundary.describe(torch.zeros(1, 2, 3, 16, 3).transpose(3, 4)), "must be contiguous"),
        (lambda: boundary.address(torch.zeros(6)[::2], 3, "x"), "x must be contiguous"),
        (lambda: ConvShape(4, 3, groups=2), "no convolution has this geometry"),
        (lambda: ConvShape(4, 3, stride=(0, 1)), "no convolution has this geometry"),
        (lambda: ConvShape(4, 3, padding=(-1, 0)), "no convolution has this geometry"),
    ],
)
def test_what_a_kernel_would_misread_is_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_map_without_its_border_is_refused() -> None:
    """A tap reads up to one row and column beyond the map; a false mark must not lead it out of the memory."""
    x = arena.with_mark(torch.ones(1, 3, 5, 5, 16), (1, 1))
    with pytest.raises(UserError, match="a kernel would leave the memory of activation"):
        operators.conv(Blocked(x, 2), torch.ones(22), None, Pattern(SHAPE, INDEX))


def test_memory_that_was_taken_away_is_refused() -> None:
    """As FSDP does with parameters between their uses."""
    values = torch.ones(22)
    values.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="a kernel would leave the memory of values"):
        layer(values)


@pytest.mark.parametrize(
    "form",
    [
        lambda v: torch.stack([v, v], 1)[:, 0],
        lambda v: v.flip(0).flip(0),
        lambda v: torch.complex(v, -v).conj().imag,  # a view with a negative bit
    ],
    ids=["strided", "copied", "negated"],
)
def test_views_are_read_correctly(form: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    values, bias, x = torch.randn(22), torch.randn(4), torch.randn(2, 3, 5, 5)
    weight = torch.zeros(108).index_put((INDEX,), values).view(4, 3, 3, 3)
    exact = F.conv2d(x, weight, bias, padding=1)
    torch.testing.assert_close(layer(form(values), form(bias), x=form(x)), exact)


@pytest.mark.parametrize("kind", [BATCH, FIXED])
def test_norms_with_strided_and_expanded_parameters(kind: int) -> None:
    x = torch.arange(2.0 * 4 * 3 * 3).view(2, 4, 3, 3)
    mine, exact = ((torch.arange(8.0)[::2].clone(), torch.ones(8)[::2].clone()) for _ in range(2))
    strided = tuple(torch.stack([t, t], 1)[:, 1] for t in mine)
    gamma = torch.full((1,), 2.0).expand(4)
    result = norm(gamma, strided, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(result, F.batch_norm(x, *exact, gamma, None, kind == BATCH))
    for updated, wanted in zip(strided, exact, strict=True):
        torch.testing.assert_close(updated, wanted)


def test_gradients_of_strided_parameters() -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(4, 2)[:, 0].requires_grad_() for _ in range(2))
    x = torch.randn(2, 4, 3, 3)
    from_blocked(operators.fused(to_blocked(x), Fused(BATCH), weight, bias)).square().sum().backward()
    mine = [weight.grad, bias.grad]
    weight.grad = bias.grad = None
    F.batch_norm(x, None, None, weight, bias, True).square().sum().backward()
    for got, wanted in zip(mine, (weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
