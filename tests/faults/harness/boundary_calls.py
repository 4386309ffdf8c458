"""Random valid and invalid calls of the kernels, for a process whose kernels have sanitizers.

    python -m harness.boundary_calls COUNT SEED [canary]

Prints one line of JSON: numbers of calls by kind, and failures. A valid call must give the numbers of torch in float64,
an invalid one must raise `UserError` with one line. The word `canary` adds a call that leaves its memory on purpose.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.deploy.frozen import freeze
from equipoise.errors import UserError
from equipoise.kernels import library, operators
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.kernels.geometry import ConvShape
from equipoise.kernels.linear import linear
from equipoise.kernels.operators import BATCH, FIXED, Fused
from equipoise.kernels.taps import Pattern
from equipoise.topology.packing import pack
from sparse_helpers import masks

Tensors = dict[str, Tensor]
Change = Callable[[Tensor, Random], Tensor]

HARMLESS: list[Change] = [
    lambda t, r: t,
    lambda t, r: torch.stack([t, t], -1)[..., 0],
    lambda t, r: t.flip(0).flip(0),
]
HARMFUL: list[Change] = [
    lambda t, r: t[: r.randrange(t.shape[0])],
    lambda t, r: torch.cat([t, t[: r.randint(1, t.shape[0])]]),
    lambda t, r: t.to(r.choice([torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool])),
    lambda t, r: t.to("meta"),
    lambda t, r: t.to_sparse(),
    lambda t, r: t[None],
]
HARMFUL_IMAGES: list[Change] = [
    lambda t, r: t[:, : r.randrange(t.shape[1])],
    lambda t, r: torch.cat([t, t[:, : r.randint(1, t.shape[1])]], 1),
    *HARMFUL[2:],
]
HARMFUL_TOKENS = HARMFUL_IMAGES[:-1]  # any leading dimensions are allowed
HARMFUL_INDEX: list[Change] = [
    lambda t, r: t + r.choice([1, 7, 1000, 2**20, 2**30]) * t.numel() + 10**6,
    lambda t, r: t - r.choice([1, 50, 10**6]) - t[0],
    lambda t, r: t.flip(0) if t.numel() > 1 else t - 10**6,
    lambda t, r: torch.cat([t, t[-1:]]),
    lambda t, r: t.float(),
    lambda t, r: t[None],
]


def convolution(random: Random, change: Callable[[Tensors], None]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a random convolution, of bf16 maps if they are rounded: ours, and torch's in float64.

    Every second one has blocks of 16 outputs x 1 input.
    """
    groups, blocks, dtype = (
        random.choice([1, 1, 2]),
        random.random() < 0.5,
        random.choice([torch.float32, torch.bfloat16]),
    )
    shape = ConvShape(
        groups * (16 * random.randint(1, 2) if blocks else random.randint(1, 18)), groups * random.randint(1, 18),
        (random.randint(1, 4), random.randint(1, 4)), (random.randint(1, 3), random.randint(1, 3)),
        (random.randint(0, 3), random.randint(0, 3)), (random.randint(1, 2), random.randint(1, 2)), groups,
    )  # fmt: skip
    size = [d * (k - 1) + random.randint(1, 7) for d, k in zip(shape.dilation, shape.kernel, strict=True)]
    weight = torch.randn(shape.out_channels, shape.in_channels // groups, *shape.kernel)
    mask = torch.rand(weight.shape) < random.choice([0.05, 0.3, 1.0])
    mask.view(-1)[random.randrange(mask.numel())] = True
    if blocks:
        mask = mask.unflatten(0, (-1, 16)).any(1, keepdim=True).expand(-1, 16, *mask.shape[1:]).flatten(0, 1)
    index = mask.flatten().nonzero().flatten()
    tensors = {
        "values": weight.flatten()[index].requires_grad_(), "index": index,
        "bias": torch.randn(shape.out_channels).requires_grad_(),
        "x": torch.randn(random.randint(1, 70), shape.in_channels, *size).to(dtype).float().requires_grad_(),
    }  # fmt: skip
    leaves = [tensors[name] for name in ("x", "values", "bias")]
    change(tensors)
    border = (random.randint(0, 3), random.randint(0, 3))
    pattern = Pattern(shape, tensors["index"])
    given = to_blocked(tensors["x"], border, dtype)
    mine = from_blocked(operators.conv(given, tensors["values"], tensors["bias"], pattern))
    grad = torch.randn(mine.shape).to(dtype).float()
    gradients = torch.autograd.grad(mine, leaves, grad)
    x, values, bias = (leaf.detach().double().requires_grad_() for leaf in leaves)
    dense = torch.zeros(weight.numel(), dtype=torch.float64).index_put((index,), values).view(weight.shape)
    exact = F.conv2d(x, dense, bias, shape.stride, shape.padding, shape.dilation, groups)
    return [mine, *gradients], [exact, *torch.autograd.grad(exact, (x, values, bias), grad.double())]


def tokens(random: Random, change: Callable[[Tensors], None]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a random linear layer on tokens."""
    outputs, inputs = random.randint(1, 70), random.randint(1, 70)
    mask = torch.rand(outputs, inputs) < random.choice([0.05, 0.3, 1.0])
    mask.view(-1)[random.randrange(mask.numel())] = True
    weight, index = torch.randn(outputs, inputs) * mask, mask.flatten().nonzero().flatten().int()
    tensors = {
        "values": weight.flatten()[index.long()].requires_grad_(), "index": index,
        "bias": torch.randn(outputs).requires_grad_(),
        "x": torch.randn(random.randint(1, 150), inputs).requires_grad_(),
    }  # fmt: skip
    leaves = [tensors[name] for name in ("x", "values", "bias")]
    change(tensors)
    mine = linear(tensors["x"], tensors["values"], tensors["bias"], tensors["index"], (outputs, inputs))
    grad = torch.randn(mine.shape)
    gradients = torch.autograd.grad(mine, leaves, grad)
    x, values, bias = (leaf.detach().double().requires_grad_() for leaf in leaves)
    dense = torch.zeros(weight.numel(), dtype=torch.float64).index_put((index.long(),), values).view(weight.shape)
    exact = F.linear(x, dense, bias)
    return [mine, *gradients], [exact, *torch.autograd.grad(exact, (x, values, bias), grad.double())]


def norm(random: Random, change: Callable[[Tensors], None]) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients of a random BatchNorm with a residual, and its running statistics."""
    channels, kind = random.randint(1, 20), random.choice([FIXED, BATCH])
    shape = (random.randint(2, 35), channels, random.randint(1, 7), random.randint(1, 7))
    tensors = {
        "gamma": torch.randn(channels).requires_grad_(), "beta": torch.randn(channels).requires_grad_(),
        "mean": torch.randn(channels), "var": torch.rand(channels) + 0.5,
        "x": torch.randn(shape).requires_grad_(), "residual": torch.randn(shape),
    }  # fmt: skip
    leaves = [tensors[name] for name in ("x", "gamma", "beta")]
    exact_statistics = [tensors[name].double() for name in ("mean", "var")]
    change(tensors)
    running = tensors["mean"], tensors["var"]
    how = Fused(kind, momentum=0.1, border=(random.randint(0, 2), random.randint(0, 2)))
    blocked = operators.fused(
        to_blocked(tensors["x"]), how, tensors["gamma"], tensors["beta"], running, to_blocked(tensors["residual"])
    )
    mine = from_blocked(blocked)
    grad = torch.randn(mine.shape)
    gradients = torch.autograd.grad(mine, leaves, grad)
    x, gamma, beta = (leaf.detach().double().requires_grad_() for leaf in leaves)
    exact = F.batch_norm(x, *exact_statistics, gamma, beta, kind == BATCH) + tensors["residual"].double()
    exact_gradients = torch.autograd.grad(exact, (x, gamma, beta), grad.double())
    return [mine, *running, *gradients], [exact, *exact_statistics, *exact_gradients]


def network(random: Random, change: Callable[[Tensors], None]) -> tuple[list[Tensor], list[Tensor]]:
    """Output of a random packed and frozen network after it has loaded its state."""
    width, size = random.randint(1, 12), random.randint(3, 9)
    model = nn.Sequential(
        nn.Conv2d(2, width, 3, random.randint(1, 2), 1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 5, random.randint(1, 3), 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    ).eval()  # fmt: skip
    mine = pack(model, masks(model, 0.4))
    state = dict(mine.state_dict())
    tensors = {"index": state["3.index"], "values": state["3.values"], "bias": state["3.bias"]}
    tensors["x"] = torch.randn(random.randint(1, 35), 2, size, random.randint(3, 9))
    x = tensors["x"].double()
    change(tensors)
    state |= {f"3.{name}": tensors[name] for name in ("index", "values", "bias")}
    try:
        mine.load_state_dict(state)
    except RuntimeError as error:  # torch's words about the shape of a bias
        raise UserError(str(error).splitlines()[0]) from None
    with torch.no_grad():
        return [mine(tensors["x"]), freeze(mine)(tensors["x"])], [model.double()(x)] * 2


KINDS = {"convolutions": convolution, "tokens": tokens, "norms": norm, "networks": network}
CONVERTED = {"values", "bias"}  # load_state_dict converts floating-point types, as torch does


def attempt(kind: str, random: Random, calls: Counter[str]) -> None:
    """Make one call. In two of three calls one tensor is changed so that the kernels cannot read it."""
    harmful = random.random() < 0.67
    name = ""

    def change(tensors: Tensors) -> None:
        nonlocal name
        name = random.choice([n for n in tensors if tensors[n].numel()])
        if kind == "networks" and name in CONVERTED:
            name = "index"
        inputs = HARMFUL_TOKENS if kind == "tokens" else HARMFUL_IMAGES
        special = {"index": HARMFUL_INDEX, "x": inputs, "residual": HARMFUL_IMAGES}
        choices = special.get(name, HARMFUL) if harmful else HARMLESS
        tensors[name] = random.choice(choices)(tensors[name], random)

    torch.manual_seed(random.randrange(2**31))
    try:
        mine, exact = KINDS[kind](random, change)
    except UserError as error:
        if not harmful or "\n" in str(error):
            raise AssertionError(f"a valid call was refused, or in more than one line: {error}") from None
        calls[f"{kind}, refused"] += 1
        return
    assert not harmful, f"an invalid {name} was taken"
    for got, wanted in zip(mine, exact, strict=True):
        room = 1e-3 * (1 + float(wanted.detach().abs().max()))
        torch.testing.assert_close(got.double(), wanted, rtol=4e-3, atol=room)  # 2^-8 is the rounding to bf16
    calls[f"{kind}, computed"] += 1


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    calls: Counter[str] = Counter()
    failures = []
    assert library.available(), library.reason()
    library.threads = lambda: 2  # type: ignore[assignment]
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        try:
            attempt(kind, Random(f"{seed} {number}"), calls)
        except Exception as error:
            line = " ".join(str(error).split())[:200]
            failures.append(f"{kind} {number} of seed {seed}: {type(error).__name__}: {line}")
    if "canary" in sys.argv:
        short, order = torch.zeros(3), torch.zeros(64, dtype=torch.int32)
        library.load().eq_weights(64, order.data_ptr(), short.data_ptr(), short.data_ptr())
    print(json.dumps({"calls": calls, "failures": failures}))


if __name__ == "__main__":
    main()
