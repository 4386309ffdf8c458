"""Watchers: the order of events, the terminal, TensorBoard."""

from __future__ import annotations

import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.errors import UserError
from equipoise.training import Trainer
from equipoise.training.watchers import TensorBoard, Terminal, Watcher, Watchers, flatten
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


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_tells_everything_and_fits(width: int) -> None:
    frames = [line for line in seen(width, terminal=True, data={"name": "digits", "batch": 64}) if "━" in line]
    assert frames
    told = re.compile(r"\d+/2 loss \d+\.\d{3} acc \d+\.\d% density 20\.\d% explored \d+\.\d% \d+/s")
    whole = [frame for frame in frames if told.match(frame)]
    assert whole
    assert all(len(frame) <= width for frame in frames)
    assert all(re.search(r"(\d+:\d\d:\d\d|-:--:--)$", frame.rstrip()) for frame in whole)  # time left


def test_tensorboard_gets_every_number_and_drops_repeated_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []
    made_with: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            made_with.extend([folder, purge_step])

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            made_with.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    made = trainer(correction="agent")
    made.watcher = TensorBoard(tmp_path / "events")
    assert not made_with  # nothing is written before the run begins
    made.run()
    assert made_with == [str(tmp_path / "events"), 1, "closed"]
    last = {name: value for name, value, step in written if step == 2}
    assert last["scores/ema/accuracy"] == made.history[1]["scores"]["ema"]["accuracy"]
    assert last["correction/c"] == made.history[1]["correction"]["c"]
    assert last["exploration"] == made.history[1]["exploration"]


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'equipoise\[tensorboard\]'"):
        TensorBoard(tmp_path / "events")
    assert not (tmp_path / "events").exists()


def test_flattening_keeps_numbers_only() -> None:
    line = {"epoch": 1, "split": "test", "flag": True, "none": None, "scores": {"plain": {"loss": 0.5}}}
    assert flatten(line) == {"epoch": 1.0, "scores/plain/loss": 0.5}
