"""The figure of the small problem: its title is computed at equal cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from equipoise.analysis.descent import Trajectory
from equipoise.analysis.descent_figure import draw_descent, finding


def constant(level: float, cost: int, bound: float) -> Trajectory:
    """Ten epochs with the same squared gradient."""
    epochs = np.arange(1, 11)
    return Trajectory(10 * epochs, cost * epochs, np.full(10, level), np.full(10, bound))


def test_the_title_compares_at_equal_cost_and_with_the_bounds(tmp_path: Path) -> None:
    late = constant(0.5, 2, 3.0)
    means = np.r_[np.full(5, 0.5), np.full(5, 0.0)]  # what comes after the cost of SGD's run is not counted
    agent = Trajectory(late.steps, late.sample_gradients, means.cumsum() / np.arange(1, 11), late.bound)
    paths = {"SGD": constant(1.0, 1, 2.0), "AGENT": agent, "SVRG": constant(0.01, 2, 1.0)}
    told = finding(paths)
    assert "AGENT leaves 0.50 × and SVRG 0.01 × its squared gradient" in told
    assert "The bounds say 1.50 × and 0.50 ×" in told
    draw_descent(paths, tmp_path / "theory.png")
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
