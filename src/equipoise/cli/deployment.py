"""`equipoise export` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.common import AllowCode, Best, Run, console, open_run


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="File to write, such as out.safetensors.")],
    values: Annotated[str, typer.Option(help="Type of packed weights: float32, bf16 or int8.")] = "float32",
    format_: Annotated[str, typer.Option("--format", help="packed, onnx or state_dict (safetensors).")] = "packed",
    weights: Annotated[str, typer.Option(help="plain, bn_recalibrated or ema, see `equipoise eval`.")] = "plain",
    best: Best = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Write the network of a run to a small file that `equipoise.load` runs with the sparse kernels."""
    from equipoise.deploy import export as deploy
    from equipoise.deploy.benchmark_table import size
    from equipoise.training.network import network_of

    deploy.check_request(out, format_, values, weights, force)
    deploy.export(network_of(open_run(run, best, allow_code=allow_code), weights), out, format_, values, force)
    console.print(f"{out}: {size(out.stat().st_size)}")
    if format_ == "state_dict":
        console.print("safetensors; the model takes images as (x - mean) / std, see the metadata of the file")


def bench(
    file: Annotated[Path, typer.Argument(help="A file that `equipoise export` wrote.")],
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each runtime; the median is printed.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Number of threads. Default: torch's.")] = None,
) -> None:
    """Compare the size and speed of an exported file with dense PyTorch and onnxruntime."""
    from equipoise.deploy import benchmark
    from equipoise.deploy.benchmark_table import report_lines

    for line in report_lines(benchmark.bench(file, repeats, threads)):
        console.print(line)
