"""Curves of runs as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = (
    "#4477AA",
    "#EE6677",
    "#228833",
    "#CCBB44",
    "#66CCEE",
    "#AA3377",
    "#777777",
)  # told apart by the colour-blind
Metrics = list[dict[str, Any]]


def draw_run(metrics: Metrics, path: Path, title: str) -> None:
    """Accuracy three ways, loss, and how density, exploration and the correction went."""
    panels: dict[str, dict[str, list[float]]] = {
        "accuracy": _series(metrics, lambda line: {w: s["accuracy"] for w, s in line["scores"].items()}),
        "loss": _series(
            metrics, lambda line: {"train": line["train_loss"], line["split"]: line["scores"]["plain"]["loss"]}
        ),
        "topology": _series(metrics, lambda line: {"density": line["density"], "explored": line["exploration"]}),
    }
    keys = ("c", "c_hat", "weight", "variance_left", "correction_norm")
    correction = _series(metrics, lambda line: {k: v for k, v in line["correction"].items() if k in keys})
    if correction:
        panels["correction"] = correction
    _draw(panels, [line["epoch"] for line in metrics], path, title)


def draw_arms(arms: Mapping[str, Metrics], path: Path, title: str, score: str = "plain") -> None:
    """Accuracy of several runs over epochs and over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, metrics), colour in zip(arms.items(), COLOURS, strict=False):
        accuracy = [100 * line["scores"][score]["accuracy"] for line in metrics]
        axes[0].plot([line["epoch"] for line in metrics], accuracy, label=name, color=colour)
        axes[1].plot([line["seconds"] for line in metrics], accuracy, label=name, color=colour)
    for axis, label in zip(axes, ("epoch", "training seconds"), strict=True):
        axis.set_xlabel(label)
        axis.set_ylabel("test accuracy, %")
        _style(axis)
    axes[0].legend(frameon=False)
    _save(figure, path, title)


def _series(metrics: Metrics, pick: Any) -> dict[str, list[float]]:
    """Values by name, one for each epoch; NaN where an epoch has none."""
    lines = [pick(line) for line in metrics]
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_known(line.get(name)) for line in lines] for name in names}


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def _draw(panels: dict[str, dict[str, list[float]]], epochs: list[int], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = 2
    rows = (len(panels) + 1) // columns
    figure, axes = plt.subplots(rows, columns, figsize=(10, 3.4 * rows), layout="constrained", squeeze=False)
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


def _save(figure: Any, path: Path, title: str) -> None:
    from matplotlib import pyplot as plt

    figure.suptitle(title, x=0.01, ha="left", parse_math=False)  # a folder's name may have a $
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _style(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
