"""Figures as PNG. Their titles are findings, computed from the numbers that they show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equipoise.display.tables import percent
from equipoise.errors import UserError
from equipoise.scores import SCORES

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")  # Okabe and Ito 2008
STYLE: dict[Any, Any] = {
    "font.size": 13,  # legible at half the size
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 12,
}
LOSS = "loss, logarithmic"
Metrics = list[dict[str, Any]]


@contextmanager
def drawing(
    path: Path,
    title: str,
    columns: int = 2,
    rows: int = 1,
    size: tuple[float, float] = (11, 4.4),
    source: str | None = None,
) -> Iterator[list[Any]]:
    """Make a figure without a display and write it to a file at the end.

    Args:
        path: The file.
        title: What the figure shows.
        columns: Number of panels next to each other.
        rows: Number of rows of panels.
        size: Width and height in inches.
        source: A text that the PNG file keeps, such as a digest of the data.

    Yields:
        The axes of the panels.

    Raises:
        UserError: If the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        try:
            yield list(axes.flat)
            figure.suptitle(title, x=0.01, ha="left", fontsize=15, parse_math=False)  # a folder's name may have a $
            figure.savefig(path, dpi=120, metadata={} if source is None else {"Source": source})
        except (OSError, ValueError) as error:
            raise UserError(f"cannot draw to {path}: {error}") from None
        finally:
            plt.close(figure)


# One run


def draw_run(metrics: Metrics, path: Path, name: str) -> None:
    """Draw accuracy, loss, and the weights and the correction if there are any.

    Args:
        metrics: The lines of the run's metrics.jsonl.
        path: The PNG file.
        name: What was trained: model, data, topology and correction.
    """
    last = metrics[-1]
    split, density, epoch = last["split"], last["density"], last["epoch"]
    keys = {"variance_left": "variance left", "c": "c", "c_hat": "ĉ", "weight": "weight γc"}
    weights = {"explored": "exploration", "active": "density"} if density < 1 else {}
    panels = {
        f"{split} accuracy, %": _percents(metrics, lambda line: _accuracies(line["scores"])),
        LOSS: _series(metrics, lambda line: {"train": line["train_loss"], split: line["scores"]["plain"]["loss"]}),
        "of all weights, %": _percents(metrics, lambda line: {label: line[key] for label, key in weights.items()}),
        "correction, %": _percents(
            metrics, lambda line: {keys[k]: v for k, v in line["correction"].items() if k in keys}
        ),
    }
    shown = {label: series for label, series in panels.items() if series}
    accuracy = percent(last["scores"]["plain"]["accuracy"])
    title = f"{name}\n{accuracy} {split} accuracy after {epoch} epoch{'s' * (epoch > 1)}"
    title += f", {percent(1 - density, 1)} sparse" if density < 1 else ", dense"
    _draw(shown, [line["epoch"] for line in metrics], path, title)


def _draw(panels: Mapping[str, Mapping[str, list[float]]], epochs: list[int], path: Path, title: str) -> None:
    columns = 3 if len(panels) == 3 else 2
    rows = (len(panels) + 1) // columns
    with drawing(path, title, columns, rows, (5.5 * columns, 0.7 + 4.3 * rows)) as axes:
        for axis, (label, series) in zip(axes, panels.items(), strict=True):
            _plot(axis, epochs, series, unit=" %" if "%" in label else "")
            axis.set_title(label)
            if label == LOSS:
                axis.set_yscale("log")


def _accuracies(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {SCORES.get(name, name): score["accuracy"] for name, score in scores.items()}


def _series(metrics: Metrics, pick: Callable[[dict[str, Any]], Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return values by name, one for each epoch; NaN if an epoch has none."""
    lines = [pick(line) for line in metrics]
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [float("nan") if (y := line.get(name)) is None else y for line in lines] for name in names}


def _percents(
    metrics: Metrics, pick: Callable[[dict[str, Any]], Mapping[str, float | None]]
) -> dict[str, list[float]]:
    return {name: [100 * value for value in values] for name, values in _series(metrics, pick).items()}


def _plot(axis: Any, epochs: list[int], series: Mapping[str, list[float]], unit: str) -> None:
    """Draw curves with their last values in the legend, thick ones first, so that curves that coincide are visible."""
    for i, (name, values) in enumerate(series.items()):
        width = 2 + 1.2 * (len(series) - 1 - i)
        end = f"{values[-1]:.{2 if unit else 3}f}{unit}" if values[-1] == values[-1] else "unknown"
        axis.plot(
            epochs,
            values,
            label=f"{name} {end}",
            color=COLOURS[i % len(COLOURS)],
            lw=width,
            marker="o" if len(values) < 3 else None,
        )
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("epoch")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)  # outside: it covers no curve


# Arms with several seeds


def draw_arms(arms: Mapping[str, Sequence[Metrics]], path: Path, title: str) -> None:
    """Draw the final accuracy of every run as a dot with the mean of its arm, and the training seconds of the arms.

    Args:
        arms: The metrics of the runs of each arm, one per seed.
        path: The PNG file.
        title: The finding.
    """
    with drawing(path, title, size=(11, 1.6 + 0.45 * len(arms))) as (accuracy, seconds):
        for row, runs in enumerate(arms.values()):
            ends = [100 * metrics[-1]["scores"]["plain"]["accuracy"] for metrics in runs]
            spread = [row + 0.5 * (k + 0.5) / len(ends) - 0.25 for k in range(len(ends))]  # equal values stay visible
            accuracy.plot(ends, spread, "o", color=COLOURS[0], alpha=0.6, ms=6)
            accuracy.plot([statistics.mean(ends)] * 2, [row - 0.4, row + 0.4], color="black", lw=2.5)
            took = statistics.median(metrics[-1]["seconds"] for metrics in runs)
            seconds.barh(row, took, color=COLOURS[0], height=0.6)
            seconds.text(took, row, f" {took:.1f}", va="center")
        accuracy.set_yticks(range(len(arms)), list(arms))
        accuracy.set_title("test accuracy, %: runs and their mean")
        seconds.set_yticks(range(len(arms)), [""] * len(arms))
        seconds.set_title("training, seconds per run")
        seconds.margins(x=0.12)
        for axis in (accuracy, seconds):
            axis.invert_yaxis()
        seconds.grid(axis="y", visible=False)
