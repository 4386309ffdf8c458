"""Tables of `equipoise measure` for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.table import Table

from equipoise.display.tables import make_table, percent

Report = Mapping[str, Any]

GRADIENTS = {  # the rows of the table, and their keys in the report
    "gradient norm, mean over batches": "norm",
    "norm of the mean gradient": "norm_of_mean",
    "variance, summed over active weights": "variance",
    "variance at the old weights": "variance_old",
    "variance / ‖E g‖², corrected for batch noise": "variance_relative",
    "correlation of the mean gradients, over weights": "correlation",
    "correlation over batches, Cov / √(Var·Var)": "correlation_of_batches",
    "correlation of a batch's gradients, over weights": "correlation_of_pairs",
    "c* = Cov(new, old) / Var(old)": "c_star",
    "ĉ, the same of batch losses": "c_hat",
}
CHOICES = {"0": "c = 0 (SGD)", "c_hat": "ĉ", "gamma_c_hat": "γĉ (AGENT)", "c_star": "c*", "1": "c = 1 (SVRG)"}


def gradient_table(report: Report, title: str) -> Table:
    """Return a table of what `measure_trainer` found, with a second column if noise on all weights was measured."""
    rows = [[name, _with_deviation(report, key)] for name, key in GRADIENTS.items()]
    rows += [[f"variance left at {name}", significant(report["variance_left"][key])] for key, name in CHOICES.items()]
    rows.append(["variance left at each layer's own c*", significant(report["variance_left_by_layer"])])
    everywhere = report["everywhere"]
    if everywhere is None:
        return make_table(["", "value"], rows, title)
    keys = [*GRADIENTS.values(), *[""] * (len(rows) - len(GRADIENTS))]
    rows = [[*row, _with_deviation(everywhere, key)] for row, key in zip(rows, keys, strict=True)]
    return make_table(["", "noise on active weights", "on all"], rows, title)


def _with_deviation(report: Report, key: str) -> str:
    """Format a number, with its deviation over the draws of the noise if known."""
    deviation = (report["deviation"] or {}).get(key)
    return significant(report.get(key)) + ("" if deviation is None else f" ± {deviation:.2g}")


def sample_line(report: Report) -> str:
    """Return a caution if the mean gradients are not of all batches, else an empty line."""
    if report["batches"] == report["of"]:
        return ""
    return (
        f"The mean gradients are of {report['batches']} of {report['of']} batches, and the noise of this sample "
        f"affects their correlation; --batches {report['of']} avoids it"
    )


def cost_table(cost: Report, c_star: Mapping[str, float | None], title: str) -> Table:
    """Return a table of what `measure_cost` found: FLOPs per image by layer, with the layer's c*, and of the run."""
    rows = [
        [
            layer["name"],
            "x".join(map(str, layer["shape"])),
            *_flops(layer["dense_forward"], layer["sparse_forward"]),
            significant(c_star.get(layer["name"])),
        ]
        for layer in cost["layers"]
    ]
    for name in ("inference", "training", "run"):
        label = "the run so far" if name == "run" else f"{name}, an image"
        rows.append([label, "", *_flops(cost[name]["dense"], cost[name]["sparse"]), ""])
    return make_table(["FLOPs", "shape", "dense", "sparse", "share", "c*"], rows, title)


def cost_line(cost: Report) -> str:
    """Return passes, seconds and memory in one line."""
    passes, memory = cost["passes"], cost["peak_memory"]
    return (
        f"samples forward {passes['forward']:,}, backward {passes['backward']:,}, of these to the weights "
        f"{passes['sample_gradients']:,}; {cost['seconds']:.1f} s of training; "
        f"{cost['active']:,} of {cost['parameters']:,} parameters active"
        + (f"; {memory / 2**30:.2f} GiB of GPU memory" if memory else "")
    )


def along_table(lines: Sequence[Report], title: str) -> Table:
    """Return a table of the lines of measure.jsonl: one row per epoch, then the mean at each learning rate."""
    keys = ("norm", "variance", "correlation", "correlation_of_batches", "c_star", "c_hat")
    rows = [
        [str(line["epoch"]), f"{line['learning_rate']:.3g}", *(significant(line[key]) for key in keys)]
        for line in lines
    ]
    for rate, group in groupby(lines, key=lambda line: line["learning_rate"]):
        phase = list(group)
        if len(phase) == 1:
            continue
        label = f"{phase[0]['epoch']}-{phase[-1]['epoch']}, mean"
        known = [[line[key] for line in phase if line[key] is not None] for key in keys]
        rows.append([label, f"{rate:.3g}", *(significant(fmean(values) if values else None) for values in known)])
    return make_table(["epoch", "lr", "norm", "variance", "corr.", "corr. batches", "c*", "ĉ"], rows, title)


def _flops(dense: int, sparse: int | None) -> list[str]:
    if sparse is None:
        return [f"{dense:.3e}", "unknown", ""]
    return [f"{dense:.3e}", f"{sparse:.3e}", percent(sparse / dense if dense else 1.0)]


def significant(value: float | None) -> str:
    """Format a number with four significant digits; empty if it is `None`."""
    return "" if value is None else f"{value:.4g}"
