"""Tables for the terminal: the epochs and layers of a run, and the table that all commands use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from equipoise.scores import SCORES

HEADINGS = {**SCORES, "bn_recalibrated": "BN recal."}  # short, to fit 80 columns


def epochs_table(metrics: list[dict[str, Any]], title: str) -> Table:
    """Return a table with one row per line of a run's metrics.jsonl."""
    corrected = any(line.get("correction") for line in metrics)
    columns = ["epoch", "lr", "loss", *HEADINGS.values(), "density", "explored", "images/s"]
    columns += ["c", "weight", "variance"] if corrected else []
    rows = [_epoch_row(line, corrected) for line in metrics]
    split = metrics[-1]["split"] if metrics else "test"
    return make_table(columns, rows, f"{title} ({split} accuracy)")


def _epoch_row(line: Mapping[str, Any], corrected: bool) -> list[str]:
    scores = line["scores"]
    row = [str(line["epoch"]), f"{line['learning_rate']:.3g}", number(line["train_loss"])]
    row += [percent(scores[score]["accuracy"]) if score in scores else "" for score in HEADINGS]
    row += [percent(line["density"]), percent(line["exploration"]), f"{line['images_per_second']:.0f}"]
    if corrected:
        row += [number(line["correction"].get(key)) for key in ("c", "weight", "variance_left")]
    return row


def layers_table(layers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the entry `layers` of a run's result.json: weights, density, and how each layer runs."""
    rows = [
        [name, str(layer["size"]), str(layer["active"]), percent(layer["active"] / layer["size"]), str(layer["runs"])]
        for name, layer in layers.items()
    ]
    return make_table(["layer", "weights", "active", "density", "runs"], rows)


def make_table(columns: Iterable[str], rows: Iterable[list[str]], title: str = "") -> Table:
    """Return a plain table whose cells are never cut; a narrow console wraps its lines instead."""
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [list(columns), *rows]
    for i, column in enumerate(zip(*cells, strict=True)):
        justify: Literal["left", "right"] = "left" if i == 0 else "right"
        table.add_column(Text(column[0]), justify=justify, no_wrap=True, min_width=max(map(cell_len, column)))
    for row in cells[1:]:
        table.add_row(*map(Text, row))  # as Text: a name such as "[b]" is not markup
    return table


def percent(share: float, digits: int = 2) -> str:
    """Format a share: `81.04 %`."""
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Format seconds: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None) -> str:
    """Format a number with three decimals; empty if it is `None` or NaN."""
    return "" if value is None or value != value else f"{value:.3f}"
