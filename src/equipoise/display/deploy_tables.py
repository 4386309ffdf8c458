"""What `equipoise bench` found, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from equipoise.deploy.benchmark import MANY, Report
from equipoise.display.tables import make_table
from equipoise.kernels.library import reason


def report_lines(report: Report) -> Iterator[str | Table]:
    """Size, parameters, and a table of latency and throughput."""
    ratio = report.dense_bytes / report.file_bytes
    yield f"file        {size(report.file_bytes)}, dense float32 {size(report.dense_bytes)}: 1/{ratio:.1f}"
    share = 100 * report.stored / report.parameters
    yield f"parameters  {report.stored:,} of {report.parameters:,} stored: {share:.2f} %"
    why = reason() or "dense is faster for the rest"
    all_sparse = report.sparse_layers == report.layers
    yield f"layers      {report.sparse_layers} of {report.layers} run sparse" + ("" if all_sparse else f": {why}")
    one, many = report.dense
    rows = [
        [name, f"{1e3 * a:.2f} ms", f"{one / a:.2f} ×", f"{MANY / b:.0f} images/s", f"{many / b:.2f} ×"]
        for name, (a, b) in report.seconds.items()
    ]
    title = f"{report.threads} thread{'s' if report.threads > 1 else ''}; × is against the faster PyTorch"
    yield make_table(["", "1 image", "", f"{MANY} images", ""], rows, title)
    if report.missing:
        yield f"without onnxruntime: {', '.join(report.missing)} not installed (pip install equipoise[onnx])"


def size(count: int) -> str:
    """Bytes as people read them."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
