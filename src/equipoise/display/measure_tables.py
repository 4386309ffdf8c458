"""Measurements as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from equipoise.display.tables import make_table, percent

Report = Mapping[str, Any]

# the rows of the table, and their keys in the report
GRADIENTS = {
    "gradient norm, mean over batches": "norm",
    "norm of the mean gradient": "norm_of_mean",
    "variance, summed over active weights": "variance",
    "variance at the old weights": "variance_old",
    "variance / ‖E g‖², free of the batches' noise": "variance_relative",
    "correlation of the mean gradients, over weights": "correlation",
    "correlation over batches, Cov / √(Var·Var)": "correlation_of_batches",
    "correlation of a batch's gradients, over weights": "correlation_of_pairs",
    "c* = Cov(new, old) / Var(old)": "c_star",
    "ĉ, the same of batch losses": "c_hat",
}
CHOICES = {"0": "c = 0 (SGD)", "c_hat": "ĉ", "gamma_c_hat": "γĉ (AGENT)", "c_star": "c*", "1": "c = 1 (SVRG)"}


def gradient_table(report: Report, title: str) -> Table:
    """One row for every number; a second column where noise on inactive weights was measured too."""
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
    """A number, and its deviation over the draws of the noise where it has one."""
    deviation = (report["deviation"] or {}).get(key)
    return significant(report.get(key)) + ("" if deviation is None else f" ± {deviation:.2g}")


def sample_line(report: Report) -> str:
    """What the batches are too few for, where they are not all."""
    if report["batches"] == report["of"]:
        return ""
    return (
        f"The mean gradients are of {report['batches']} of {report['of']} batches, whose noise is a part of their "
        f"correlation; --batches {report['of']} has none"
    )


def cost_table(cost: Report, c_star: Mapping[str, float | None], title: str) -> Table:
    """FLOPs of an image layer by layer, each with its c*, and of the whole run."""
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
    """Passes, seconds, memory in one line."""
    passes, memory = cost["passes"], cost["peak_memory"]
    return (
        f"samples forward {passes['forward']:,}, backward {passes['backward']:,}, of these to the weights "
        f"{passes['sample_gradients']:,}; {cost['seconds']:.1f} s of training; "
        f"{cost['active']:,} of {cost['parameters']:,} parameters active"
        + (f"; {memory / 2**30:.2f} GiB of GPU memory" if memory else "")
    )


def along_table(lines: Sequence[Report], title: str) -> Table:
    """A run measured on its way: one row an epoch, then the means over every phase of one learning rate."""
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
        means = [_mean([line[key] for line in phase]) for key in keys]
        rows.append([label, f"{rate:.3g}", *map(significant, means)])
    return make_table(["epoch", "lr", "norm", "variance", "corr.", "corr. batches", "c*", "ĉ"], rows, title)


def _flops(dense: int, sparse: int | None) -> list[str]:
    if sparse is None:
        return [f"{dense:.3e}", "unknown", ""]
    return [f"{dense:.3e}", f"{sparse:.3e}", percent(sparse / dense if dense else 1.0)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def significant(value: float | None) -> str:
    """Four digits, whatever the scale."""
    return "" if value is None else f"{value:.4g}"
