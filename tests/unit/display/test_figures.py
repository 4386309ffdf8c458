"""Figures: what their titles and labels say, and that nothing that was measured is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from equipoise.display.figures import COLOURS, draw_arms, draw_run, drawing
from equipoise.errors import UserError
from study_helpers import line


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The figures that were drawn."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    yield drawn
    monkeypatch.undo()
    plt.close("all")


def legends(figure: Any) -> list[list[str]]:
    return [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes]


def test_a_run_is_named_with_its_final_numbers_in_percent(figures: list[Any], tmp_path: Path) -> None:
    metrics = [line(epoch, 0.25 * epoch, c=0.4) for epoch in (1, 2, 3)]
    draw_run(metrics, tmp_path / "curves.png", "here: vgg_c on cifar10, set with agent")
    (figure,) = figures
    density = metrics[-1]["density"]
    assert figure.get_suptitle() == (
        "here: vgg_c on cifar10, set with agent\n"
        f"75.00 % test accuracy after 3 epochs, {100 - 100 * density:.1f} % sparse"
    )
    accuracy, loss, weights, correction = legends(figure)
    assert "plain 75.00 %" in accuracy
    assert loss[0].startswith("train ")
    assert f"active {100 * density:.2f} %" in weights
    assert "c 40.00 %" in correction
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([25, 50, 75])


def test_a_dense_run_has_no_empty_panel(figures: list[Any], tmp_path: Path) -> None:
    metrics = [{**line(1, 0.5), "density": 1.0, "correction": {}}]
    draw_run(metrics, tmp_path / "curves.png", "x")
    (figure,) = figures
    assert len(figure.axes) == 2
    assert figure.get_suptitle().endswith("after 1 epoch, dense")


def test_equal_curves_are_all_visible(figures: list[Any], tmp_path: Path) -> None:
    draw_run([line(epoch, 0.5) for epoch in (1, 2, 3)], tmp_path / "curves.png", "x")
    for axis in figures[0].axes:
        widths = [curve.get_linewidth() for curve in axis.lines]
        assert widths == sorted(set(widths), reverse=True)  # later ones, which are on top, are thinner
        assert len({curve.get_color() for curve in axis.lines}) == len(widths)


def test_every_run_of_an_arm_is_a_dot(figures: list[Any], tmp_path: Path) -> None:
    arms = {
        "a": [[{**line(1, accuracy), "seconds": 3.0}] for accuracy in (0.5, 0.5, 0.8)],
        "b": [[{**line(1, 0.9), "seconds": 4.0}]],
    }
    draw_arms(arms, tmp_path / "arms.png", "a finding")
    accuracy, seconds = figures[0].axes
    dots, mean, *_ = accuracy.lines
    assert [*dots.get_xdata()] == pytest.approx([50, 50, 80])
    assert len(set(dots.get_ydata())) == 3  # equal accuracies do not hide each other
    assert mean.get_xdata()[0] == pytest.approx(60)
    assert [text.get_text() for text in accuracy.get_yticklabels()] == ["a", "b"]
    assert [text.get_text().strip() for text in seconds.texts] == ["3.0", "4.0"]


# Machado, Oliveira and Fernandes 2009, severity 1
SEEN_BY = {
    "deuteranopes": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopes": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def palettes() -> list[list[str]]:
    """Of the figures, and of the report in its light and its dark theme."""
    style = (resources.files("equipoise.report") / "report.css").read_text(encoding="utf-8")
    pairs = re.findall(r"--s\d: light-dark\((#\w+), (#\w+)\)", style)
    return [[*COLOURS], *map(list, zip(*pairs, strict=True))]


@pytest.mark.parametrize("people", SEEN_BY)
def test_the_colour_blind_can_tell_the_colours_apart(people: str) -> None:
    """By their distances in CIELAB; one of 2.3 is just noticeable."""
    for colours in palettes():
        assert len(colours) == 7
        rgb = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        xyz = np.clip(linear @ np.array(SEEN_BY[people]).T, 0, 1) @ TO_XYZ.T
        f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
        assert min(np.linalg.norm(a - b) for i, a in enumerate(lab) for b in lab[:i]) > 15


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot draw to .*nowhere"), drawing(tmp_path / "nowhere" / "x.png", "t"):
        pass
