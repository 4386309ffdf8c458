"""A figure of AGENT, SVRG and SGD on a small non-convex problem, with the bounds of the theory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.analysis.descent import Array, Trajectory
from equipoise.display.figures import COLOURS
from equipoise.errors import UserError

# thick lines first, so that curves that coincide are all visible
WIDTHS = {"SGD": 5.0, "AGENT": 2.5, "SVRG": 1.2}
LOOKS = dict(zip(WIDTHS, (COLOURS[3], COLOURS[0], COLOURS[1]), strict=True))
LEAST = 1e-10  # SVRG converges to the rounding error


def draw_descent(paths: Mapping[str, Trajectory], file: Path) -> None:
    """Draw the squared norm of the full gradient: its running mean with the bounds, and by epoch over cost."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_cost) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    for name, colour in LOOKS.items():
        path = paths[name]
        by_step.plot(path.steps, path.bound, "--", color=colour, lw=1.5, label=f"bound, {name}")
        by_step.plot(path.steps, path.average, color=colour, lw=WIDTHS[name], label=name)
        by_cost.plot(path.sample_gradients, by_epoch(path.average), color=colour, lw=WIDTHS[name], label=name)
    by_step.set_title("Mean over all steps so far, and the bound on it", loc="left", fontsize=10)
    by_cost.set_title("Mean over each epoch, at equal cost", loc="left", fontsize=10)
    _style(by_step, "steps")
    _style(by_cost, "sample gradients computed")
    by_step.set_ylabel("‖full gradient‖²")
    by_cost.set_ylim(bottom=LEAST)
    figure.suptitle("Gradient correction on a small non-convex problem", x=0.01, ha="left")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw to {file}: {error}") from None
    finally:
        plt.close(figure)


def _style(axis: Any, label: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


def by_epoch(average: Array) -> Array:
    """Convert running means over epochs to the mean of each epoch."""
    epochs = np.arange(1, len(average) + 1)
    return np.diff(epochs * average, prepend=0.0)
