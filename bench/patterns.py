"""What structured sparsity gains on this GPU: 2:4 and blocks against dense bf16, by layer shape and in training.

    PYTHONPATH=src python3 bench/patterns.py [--out FILE.json]

Inference: Linear layers of ViT-B/16 and ViT-L/16 and convolutions of ResNet-50, dense and with torch's semi-structured
tensors, and the Linear layers with square blocks at 90 % through torch's BSR Triton operators. Training: forward and
backward pass of the MLP of a ViT, dense and with a transposable 2:4 mask, whose weights cuSPARSELt compresses in every
step. All is measured twice: captured in a CUDA graph, which is the time of the kernels, and as Python launches it.
Every number is the median of repeats. Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.deploy.two_to_four import SemiConv2d, SemiLinear, check_gpu, milliseconds

IMAGES, TOKENS = 64, 197
LINEAR = {
    "ViT-B qkv": (768, 2304),
    "ViT-B projection": (768, 768),
    "ViT-B MLP 1": (768, 3072),
    "ViT-B MLP 2": (3072, 768),
    "ViT-L qkv": (1024, 3072),
    "ViT-L MLP 1": (1024, 4096),
    "ViT-L MLP 2": (4096, 1024),
}
CONV = {  # inputs, outputs, kernel, height and width
    "ResNet-50 64 to 256, 1x1": (64, 256, 1, 56),
    "ResNet-50 256 to 64, 1x1": (256, 64, 1, 56),
    "ResNet-50 512 to 128, 1x1": (512, 128, 1, 28),
    "ResNet-50 256 to 1024, 1x1": (256, 1024, 1, 14),
    "ResNet-50 1024 to 256, 1x1": (1024, 256, 1, 14),
    "ResNet-50 512 to 2048, 1x1": (512, 2048, 1, 7),
    "ResNet-50 2048 to 512, 1x1": (2048, 512, 1, 7),
    "ResNet-50 64 to 64, 3x3": (64, 64, 3, 56),
    "ResNet-50 128 to 128, 3x3": (128, 128, 3, 28),
    "ResNet-50 256 to 256, 3x3": (256, 256, 3, 14),
    "ResNet-50 512 to 512, 3x3": (512, 512, 3, 7),
}
BLOCKS, BLOCK_SPARSITY = (16, 32, 64), 0.9
Row = dict[str, Any]


def two_to_four(weight: Tensor) -> Tensor:
    """Keep the largest two of every four inputs."""
    groups = weight.movedim(1, -1).unflatten(-1, (-1, 4))
    kept = torch.zeros_like(groups).scatter_(-1, groups.abs().topk(2, -1).indices, 1.0)
    return (groups * kept).flatten(-2).movedim(-1, 1)


def attempt(run: Callable[[], Any]) -> Any:
    """Run a measurement; an operator that does not work here is a line of the table, not the end of it."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def both(run: Callable[[Tensor], object], x: Tensor) -> dict[str, float | str]:
    """Return milliseconds in a CUDA graph and as Python launches it."""
    return {"graph": attempt(lambda: milliseconds(captured(run, x), x)), "eager": milliseconds(run, x)}


def captured(run: Callable[[Tensor], object], x: Tensor) -> Callable[[Tensor], object]:
    """Capture a run, which must have the gradients of its parameters already, if it computes any."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x)
    return lambda _: graph.replay()


def inference(name: str, layer: nn.Linear | nn.Conv2d, x: Tensor, semi: type[Any]) -> Row:
    layer = layer.to("cuda", torch.bfloat16, memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
    layer.weight.copy_(two_to_four(layer.weight))
    row: Row = {"layer": name, "dense": both(layer, x)}

    def sparse() -> dict[str, float | str]:
        converted = semi(layer)
        expected, found = layer(x).float(), converted(x).float()
        row["error"] = float((found - expected).norm() / expected.norm())
        return both(converted, x)

    row["2:4"] = attempt(sparse)
    return row


def blocks(name: str, inputs: int, outputs: int, x: Tensor) -> Row:
    """Square blocks at 90 %, through torch's BSR Triton operator; the same blocks dense."""
    from torch.sparse._triton_ops import bsr_dense_addmm

    row: Row = {"layer": name}
    columns = x.reshape(-1, inputs).t().contiguous()
    columns = columns[:, : columns.shape[1] // 64 * 64].contiguous()
    for side in BLOCKS:
        chosen = torch.rand(outputs // side, inputs // side, device="cuda") > BLOCK_SPARSITY
        mask = chosen.repeat_interleave(side, 0).repeat_interleave(side, 1)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * mask
        bsr = weight.to_sparse_bsr((side, side))
        zero = torch.zeros(outputs, columns.shape[1], device="cuda", dtype=torch.bfloat16)

        def run(dense: Tensor, bsr: Tensor = bsr, zero: Tensor = zero) -> Tensor:
            return bsr_dense_addmm(zero, bsr, dense, beta=0)

        def measured(weight: Tensor = weight, run: Callable[[Tensor], Tensor] = run, side: int = side) -> Any:
            expected = (weight @ columns).float()
            row[f"error {side}"] = float((run(columns).float() - expected).norm() / expected.norm())
            return both(run, columns)

        row.setdefault("dense", both(weight.matmul, columns))
        row[f"{side}x{side}"] = attempt(measured)
    return row


class TwoToFour(torch.autograd.Function):
    """x Wᵀ with a transposable 2:4 mask on W, which is compressed in every step; sparse in two of three products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        masked = weight * mask
        ctx.save_for_backward(x, masked)
        return torch._cslt_sparse_mm(torch._cslt_compress(masked), x.t()).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, masked = ctx.saved_tensors
        dx = torch._cslt_sparse_mm(torch._cslt_compress(masked.t().contiguous()), dy.t()).t()
        return dx, dy.t() @ x, None


def transposable(weight: Tensor) -> Tensor:
    """A mask with two of every four in each row and each column."""
    rows, columns = (torch.arange(size, device=weight.device) for size in weight.shape)
    return ((rows[:, None] + columns) % 4 < 2).to(weight.dtype)


def training(width: int, hidden: int) -> Row:
    """Forward and backward pass of the two layers of an MLP."""
    x = torch.randn(IMAGES * TOKENS // 64 * 64, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        for shape in ((hidden, width), (width, hidden))
    ]
    masks = [transposable(weight) for weight in weights]

    def step(multiply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            hidden = F.gelu(multiply(x, weights[0], masks[0]))
            loss = multiply(hidden, weights[1], masks[1]).square().mean()
            return torch.autograd.grad(loss, [x, *weights])

        return run

    def dense(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return F.linear(x, weight)

    def masked(x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        return F.linear(x, weight * mask)

    def sparse() -> dict[str, float | str]:
        expected, found = (step(multiply)(x)[0].float() for multiply in (masked, TwoToFour.apply))
        row["error"] = float((found - expected).norm() / expected.norm())
        return both(step(TwoToFour.apply), x)

    row: Row = {"layer": f"training, MLP {width} x {hidden}", "dense": both(step(dense), x)}
    row["2:4"] = attempt(sparse)
    return row


def line(row: Row) -> str:
    cells = [f"{row['layer']:<30}"]
    for name, value in row.items():
        if name == "layer" or name.startswith("error"):
            continue
        cells.append(f"{name} {value}" if isinstance(value, str) else _cell(name, value, row["dense"]))
    return "   ".join(cells)


def _cell(name: str, times: dict[str, Any], dense: dict[str, Any]) -> str:
    if isinstance(times["graph"], str):
        return f"{name} {times['graph']}, eager {times['eager']:.3f} ms"
    gain = "" if name == "dense" else f" = {dense['graph'] / times['graph']:4.2f} x"
    return f"{name} {times['graph']:7.3f} ms{gain} (eager {times['eager']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write, again after every row")
    arguments = parser.parse_args()
    check_gpu()
    warnings.filterwarnings("ignore", message=".*prototype|.*beta state|.*non-optimal triton")
    torch.manual_seed(0)
    tokens = {
        width: torch.randn(IMAGES, TOKENS, width, device="cuda", dtype=torch.bfloat16) for width, _ in LINEAR.values()
    }
    rows: list[Row] = []
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

    def add(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")

    print(", ".join(machine.values()))
    with torch.no_grad():
        for name, (inputs, outputs) in LINEAR.items():
            add(inference(name, nn.Linear(inputs, outputs), tokens[inputs], SemiLinear))
        for name, (inputs, outputs, kernel, size) in CONV.items():
            x = torch.randn(IMAGES, inputs, size, size, device="cuda", dtype=torch.bfloat16)
            layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
            add(inference(name, layer, x.to(memory_format=torch.channels_last), SemiConv2d))
    for width, hidden in ((768, 3072), (1024, 4096)):
        add(training(width, hidden))
    with torch.no_grad():
        for name, (inputs, outputs) in LINEAR.items():
            add(blocks(f"{name}, blocks", inputs, outputs, tokens[inputs]))


if __name__ == "__main__":
    main()
