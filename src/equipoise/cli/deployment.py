"""`equipoise export`, `predict` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.checks import MOST_THREADS
from equipoise.cli.common import AllowCode, Best, Run, console, import_approved, open_run
from equipoise.errors import UserError

if TYPE_CHECKING:
    from torch import nn

File = Annotated[Path, typer.Argument(help="A file that `equipoise export` wrote.")]


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="File to write, such as out.safetensors, out.onnx or out.c.")],
    values: Annotated[
        str | None,
        typer.Option(help="Type of the weights: float32 (default), int8 (packed, c) or bf16 (packed, 2:4)."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="packed, 2:4 (for a GPU), c, onnx or state_dict. Default: that of the suffix."),
    ] = None,
    weights: Annotated[str, typer.Option(help="plain, bn_recalibrated or ema, see `equipoise eval`.")] = "plain",
    best: Best = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Write the network of a run to a small file that `equipoise.load` runs with the sparse kernels."""
    from equipoise.deploy import export as deploy
    from equipoise.deploy.benchmark_table import size
    from equipoise.training.run_network import network_of

    form = deploy.format_of(out, format_)
    deploy.check_request(out, form, values, weights, force)
    deploy.export(network_of(open_run(run, best, allow_code=allow_code), weights), out, form, values, force)
    console.print(f"{out}: {size(out.stat().st_size)}")
    if form == "state_dict":
        console.print("safetensors; the model takes images as (x - mean) / std, see the metadata of the file")


def predict(
    file: File,
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print for each image.")] = 1,
    allow_code: AllowCode = False,
) -> None:
    """Classify images with an exported file: print the most probable classes of each."""
    from equipoise.deploy.loading import with_kernels
    from equipoise.deploy.packed_file import read_packed
    from equipoise.deploy.predict import predict as classify
    from equipoise.display.tables import percent

    unpacked = read_packed(file, allow_code)
    found = classify(with_kernels(unpacked.model), unpacked.blueprint, images, top)
    for image, classes in zip(images, found, strict=True):
        console.print(f"{image}: {', '.join(f'{name} {percent(share, 1)}' for name, share in classes)}")


def bench(
    file: File,
    model: Annotated[
        list[str] | None,
        typer.Argument(help="For a file of equipoise.save: model=package.nets:Net and its options, model.KEY=VALUE."),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="For a file of equipoise.save: the shape of an input, such as 3x32x32.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each runtime; the median is printed.")] = 15,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="Number of threads. Default: torch's.")
    ] = None,
    allow_code: AllowCode = False,
) -> None:
    """Compare the size and speed of an exported file with dense PyTorch and onnxruntime."""
    from equipoise.deploy.benchmark import bench, custom_subject, packed_subject
    from equipoise.deploy.benchmark_table import report_lines

    if bool(model) != bool(shape):
        raise UserError("a custom model needs both, such as `model=package.nets:Net --shape 3x32x32`")
    subject = custom_subject(file, _custom(model), parse_shape(shape)) if model else packed_subject(file, allow_code)
    for line in report_lines(bench(subject, repeats, threads)):
        console.print(line)


def _custom(words: list[str]) -> nn.Module:
    """Make the model that `model=package.nets:Net model.KEY=VALUE` describes."""
    from equipoise.config import build, check_names, split
    from equipoise.models import MODELS
    from equipoise.training import apply_overrides

    import_approved({}, words)
    raw = apply_overrides({}, words)
    check_names(raw, ["model"], "bench")
    name, options = split(raw["model"], "model")
    return build(MODELS[name], options, "model")


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse `3x32x32`."""
    words = text.split("x")
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 2**20 for word in words):
        raise UserError(f"--shape {text}: expected the shape of one input, such as 3x32x32")
    return tuple(map(int, words))
