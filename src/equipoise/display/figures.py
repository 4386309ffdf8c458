"""Curves of runs as PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#777777")  # for the colour-blind too
Metrics = list[dict[str, Any]]
Series = dict[str, list[float]]


def draw_run(metrics: Metrics, path: Path, title: str) -> None:
    """Draw accuracy, loss, topology and correction from the lines of a run's metrics.jsonl into a PNG file."""
    keys = ("c", "c_hat", "weight", "variance_left", "correction_norm")
    panels = {
        "accuracy": _series(metrics, lambda line: {name: s["accuracy"] for name, s in line["scores"].items()}),
        "loss": _series(
            metrics, lambda line: {"train": line["train_loss"], line["split"]: line["scores"]["plain"]["loss"]}
        ),
        "topology": _series(metrics, lambda line: {"density": line["density"], "explored": line["exploration"]}),
        "correction": _series(metrics, lambda line: {k: v for k, v in line["correction"].items() if k in keys}),
    }
    shown = {name: series for name, series in panels.items() if series}
    _draw(shown, [line["epoch"] for line in metrics], path, title)


def draw_arms(arms: Mapping[str, Metrics], path: Path, title: str, score: str = "plain") -> None:
    """Draw the accuracy of several runs over epochs and over seconds, each from the lines of its metrics.jsonl."""
    figure, axes = _subplots(1, 4.0)
    left, right = axes.flat
    for (name, metrics), colour in zip(arms.items(), COLOURS, strict=False):
        accuracy = [100 * line["scores"][score]["accuracy"] for line in metrics]
        left.plot([line["epoch"] for line in metrics], accuracy, label=name, color=colour)
        right.plot([line["seconds"] for line in metrics], accuracy, label=name, color=colour)
    for axis, label in ((left, "epoch"), (right, "training seconds")):
        axis.set_xlabel(label)
        axis.set_ylabel("test accuracy, %")
        _style(axis)
    left.legend(frameon=False)
    _save(figure, path, title)


def _series(metrics: Metrics, pick: Callable[[dict[str, Any]], Mapping[str, float | None]]) -> Series:
    """Return values by name, one for each epoch; NaN if an epoch has none."""
    lines = [pick(line) for line in metrics]
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [float("nan") if (y := line.get(name)) is None else y for line in lines] for name in names}


def _draw(panels: Mapping[str, Series], epochs: list[int], path: Path, title: str) -> None:
    rows = (len(panels) + 1) // 2
    figure, axes = _subplots(rows, 3.4 * rows)
    for axis, (name, series) in zip(axes.flat, panels.items(), strict=False):
        for (label, values), colour in zip(series.items(), COLOURS, strict=False):
            marker = "o" if len(values) < 3 else None
            axis.plot(epochs, values, label=label.replace("_", " "), color=colour, marker=marker)
        axis.set_title(name, loc="left")
        axis.set_xlabel("epoch")
        axis.legend(frameon=False)
        _style(axis)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    _save(figure, path, title)


def _subplots(rows: int, height: float) -> Any:
    """Make a figure without a display, with rows of two panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, 2, figsize=(10, height), layout="constrained", squeeze=False)


def _save(figure: Any, path: Path, title: str) -> None:
    from matplotlib import pyplot as plt

    figure.suptitle(title, x=0.01, ha="left", parse_math=False)  # the name of a folder may have a $
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _style(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
