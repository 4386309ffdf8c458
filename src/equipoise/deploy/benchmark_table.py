"""The report of `equipoise bench` for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from equipoise.deploy.benchmark import MANY, Report
from equipoise.display.tables import make_table, percent
from equipoise.kernels.library import reason


def report_lines(report: Report) -> Iterator[str | Table]:
    """Yield file size, parameters and sparse layers as lines, and a table of latency and throughput."""
    ratio = report.dense_bytes / report.file_bytes
    yield f"file        {size(report.file_bytes)}, dense float32 {size(report.dense_bytes)}: 1/{ratio:.1f}"
    share = percent(report.stored / report.parameters)
    yield f"parameters  {report.stored:,} of {report.parameters:,} stored: {share}"
    why = "" if report.sparse_layers == report.layers else f": {reason() or 'dense is faster for the rest'}"
    yield f"layers      {report.sparse_layers} of {report.layers} run sparse{why}"
    one, many = report.dense
    rows = [
        [name, f"{1e3 * a:.2f} ms", f"{one / a:.2f} ×", f"{MANY / b:.0f} images/s", f"{many / b:.2f} ×"]
        for name, (a, b) in report.seconds.items()
    ]
    title = (
        f"{report.threads} thread{'s' if report.threads > 1 else ''}; × is the speed relative to the faster PyTorch"
    )
    yield make_table(["", "1 image", "", f"{MANY} images", ""], rows, title)
    if report.without_onnx:
        yield f"without onnxruntime: {report.without_onnx}"


def size(count: int) -> str:
    """Format a number of bytes: `1.23 MB`."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
