"""Watchers: the order of events, the terminal, lines of progress."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from equipoise.errors import UserError
from equipoise.training import Trainer
from equipoise.training.watchers import ProgressLines, Terminal, Watcher, Watchers
from train_helpers import BATCHES, trainer


class Diary(Watcher):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def begin(self, trainer: Trainer) -> None:
        self.events.append("begin")

    def step(self, trainer: Trainer) -> None:
        self.events.append(trainer.step)

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        self.events.append(f"epoch {line['epoch']}")

    def end(self) -> None:
        self.events.append("end")


def test_events_come_in_order_to_all_who_watch() -> None:
    diaries = Diary(), Diary()
    made = trainer()
    made.watcher = Watchers(*diaries)
    made.run()
    steps = list(range(1, 2 * BATCHES + 1))
    expected = ["begin", *steps[:BATCHES], "epoch 1", *steps[BATCHES:], "epoch 2", "end"]
    assert diaries[0].events == diaries[1].events == expected


def test_the_end_comes_in_any_case() -> None:
    diary = Diary()
    made = trainer(optimizer={"name": "sgd", "lr": 1e30})
    made.watcher = diary
    with pytest.raises(UserError):
        made.run()
    assert diary.events[-1] == "end"


def seen(width: int, terminal: bool, **changes: Any) -> list[str]:
    """The lines of a terminal, and the frames of its progress bar."""
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    made = trainer(**changes)
    made.watcher = Terminal(console, "run[/b]")
    made.run()
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_without_a_terminal_there_is_a_line_per_epoch() -> None:
    lines = seen(80, terminal=False)
    assert len(lines) == 2
    assert lines[1].startswith("run[/b] epoch 2/2  loss ")
    for word in ("plain ", "bn_recalibrated ", "ema ", "density 20.0", "explored ", " images/s"):
        assert word in lines[1]


def test_without_a_terminal_a_line_every_30_seconds_tells_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 8 seconds of a clock of ours, an evaluation none: a line at 32 s, and 32 s after each line."""
    lines: list[str] = []
    made = trainer(epochs=3)
    made.watcher = ProgressLines(lines.append, "run")
    monkeypatch.setattr("time.perf_counter", lambda: 8.0 * made.step)
    made.run()
    seen = [
        re.match(r"run epoch (\d)/3, batch (\d)/6  loss \d+\.\d{4}  30 images/s  about (.*) left$", x) for x in lines
    ]
    assert [match and match.groups() for match in seen] == [
        ("1", "4", "2 min"),  # 14 steps of 8 s
        ("2", "4", "64 s"),
        ("3", "4", "16 s"),
    ]
    assert len(lines) == 3


def test_a_terminal_has_these_lines_if_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLines, "EVERY", 0.0)
    assert len([line for line in seen(80, terminal=False) if ", batch " in line]) == 2 * BATCHES
    assert not [line for line in seen(80, terminal=True) if ", batch " in line]


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_tells_everything_and_fits(width: int) -> None:
    frames = [line for line in seen(width, terminal=True, data={"name": "digits", "batch": 64}) if "━" in line]
    assert frames
    told = re.compile(r"\d+/2 loss \d+\.\d{3} acc \d+\.\d% density 20\.\d% explored \d+\.\d% \d+/s")
    whole = [frame for frame in frames if told.match(frame)]
    assert whole
    assert all(len(frame) <= width for frame in frames)
    assert all(re.search(r"(\d+:\d\d:\d\d|-:--:--)$", frame.rstrip()) for frame in whole)  # time left
