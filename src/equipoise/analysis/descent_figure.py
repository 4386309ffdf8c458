"""A figure of AGENT, SVRG and SGD on a small non-convex problem, with the bounds of the theory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from equipoise.analysis.descent import Array, Trajectory
from equipoise.display.figures import COLOURS, drawing

# thick lines first, so that curves that coincide are all visible
WIDTHS = {"SGD": 6.0, "AGENT": 3.5, "SVRG": 1.8}
LOOKS = dict(zip(WIDTHS, (COLOURS[6], COLOURS[0], COLOURS[1]), strict=True))
LEAST = 1e-10  # SVRG converges to the rounding error


def draw_descent(paths: Mapping[str, Trajectory], file: Path) -> None:
    """Draw how AGENT and SVRG differ from SGD: bounds and measured means over steps, and the gradient over cost."""
    sgd = paths["SGD"]
    with drawing(file, finding(paths), size=(12, 5)) as (by_step, by_cost):
        by_step.axhline(1, color=LOOKS["SGD"], lw=WIDTHS["SGD"], label="SGD")
        for name, colour in LOOKS.items():
            path = paths[name]
            if name != "SGD":
                by_step.plot(path.steps, path.bound / sgd.bound, "--", color=colour, lw=2.5, label=f"{name}, bound")
                measured, width = path.average / sgd.average, WIDTHS[name]
                by_step.plot(path.steps, measured, color=colour, lw=width, label=f"{name}, measured")
            by_cost.plot(path.sample_gradients, by_epoch(path.average), color=colour, lw=WIDTHS[name], label=name)
        by_step.set_title("mean ‖gradient‖² over all steps, relative to SGD")
        by_step.yaxis.set_major_formatter("{x:.1f} ×")
        by_step.set_xlabel("steps")
        by_cost.set_title("mean ‖gradient‖² of each epoch")
        by_cost.set_yscale("log")
        by_cost.set_ylim(bottom=LEAST)
        by_cost.set_xlabel("sample gradients computed")
        for axis in (by_step, by_cost):
            axis.set_xscale("log")
            axis.legend(loc="upper right")


def finding(paths: Mapping[str, Trajectory]) -> str:
    """Compare the last epochs and the bounds of AGENT and SVRG with those of SGD, at the cost of SGD's whole run."""
    sgd = paths["SGD"]
    cost = sgd.sample_gradients[-1]

    def left(name: str) -> float:
        path = paths[name]
        return float(by_epoch(path.average)[path.sample_gradients <= cost][-5:].mean())

    agent, svrg = (left(name) / left("SGD") for name in ("AGENT", "SVRG"))
    bounds = [paths[name].bound[-1] / sgd.bound[-1] for name in ("AGENT", "SVRG")]
    return (
        f"On a small non-convex problem, at SGD's cost, AGENT leaves {agent:.2f} × and SVRG {svrg:.1g} × its squared "
        f"gradient.\nThe bounds say {bounds[0]:.2f} × and {bounds[1]:.2f} × after the same steps."
    )


def by_epoch(average: Array) -> Array:
    """Convert running means over epochs to the mean of each epoch."""
    epochs = np.arange(1, len(average) + 1)
    return np.diff(epochs * average, prepend=0.0)
