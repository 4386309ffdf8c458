"""Observers of a training run: a terminal, TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


class Watcher:
    """Base of the watchers; does nothing."""

    def begin(self, trainer: Trainer) -> None:
        """Training starts or resumes."""

    def step(self, trainer: Trainer) -> None:
        """One or more steps have been taken."""

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """An epoch has ended; `line` has its metrics."""

    def end(self) -> None:
        """Training has ended, also by an error."""


class Terminal(Watcher):
    """Prints a line per epoch and, on a terminal, a progress bar.

    Args:
        console: Where to print.
        title: Printed before every line.
    """

    def __init__(self, console: Console | None = None, title: str = "") -> None:
        self.console = console or Console()
        self.title = title
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._since, self._images = 0.0, 0  # at the start of this epoch
        self._exploration = (-1, 0.0)  # number of the topology update, exploration after it

    def begin(self, trainer: Trainer) -> None:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.start()
            now = "compiling the first steps ..." if trainer.parts.engine.captures else ""
            self._task = self._progress.add_task(now, total=trainer.total_steps, completed=trainer.step)
            self._since, self._images = time.perf_counter(), trainer.images

    def step(self, trainer: Trainer) -> None:
        if self._progress is not None and trainer.batch % 10 == 0:
            self._progress.update(self._task, completed=trainer.step, description=self._now(trainer))

    def _now(self, trainer: Trainer) -> str:
        """Describe the state briefly, so that the bar and the time left fit into 80 columns with it."""
        meter, topology = trainer.meter, trainer.parts.topology
        if self._exploration[0] != topology.updates:
            self._exploration = (topology.updates, topology.exploration)
        speed = (trainer.images - self._images) / max(time.perf_counter() - self._since, 1e-9)
        return (
            f"{trainer.epoch + 1}/{trainer.recipe.epochs} loss {meter.loss:.3f} acc {meter.accuracy:.1%} "
            f"density {topology.density:.1%} explored {self._exploration[1]:.1%} {speed:.0f}/s"
        )

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        scores = "  ".join(f"{name} {s['accuracy']:.2%}" for name, s in line["scores"].items())
        self.console.print(
            f"{self.title} epoch {line['epoch']}/{trainer.recipe.epochs}  loss {line['train_loss']:.4f}  "
            f"{line['split']}: {scores}  density {line['density']:.2%}  explored {line['exploration']:.1%}  "
            f"{line['images_per_second']:.0f} images/s",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        self._since, self._images = time.perf_counter(), trainer.images

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class TensorBoard(Watcher):
    """Writes all metrics as TensorBoard scalars (extra `tensorboard`).

    Args:
        folder: The folder of the event files.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("TensorBoard is not installed; pip install 'equipoise[tensorboard]'") from None
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, trainer: Trainer) -> None:
        """Open the event file and drop the events of epochs that a resumed run repeats."""
        self._writer = self._make(str(self._folder), purge_step=trainer.epoch + 1)

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        for name, value in flatten(line).items():
            self._writer.add_scalar(name, value, line["epoch"])

    def end(self) -> None:
        self._writer.close()


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def begin(self, trainer: Trainer) -> None:
        for watcher in self._watchers:
            watcher.begin(trainer)

    def step(self, trainer: Trainer) -> None:
        for watcher in self._watchers:
            watcher.step(trainer)

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.epoch(trainer, line)

    def end(self) -> None:
        for watcher in self._watchers:
            watcher.end()


def flatten(line: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested metrics to names such as `scores/plain/accuracy`; values that are not numbers are left out."""
    flat: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{key}"] = float(value)
    return flat
