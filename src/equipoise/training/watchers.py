"""Observers of a training run: their base, a terminal, lines of progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from equipoise.display.tables import duration

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


class ProgressLines(Watcher):
    """Prints a line every 30 seconds of training.

    Args:
        say: Prints a line.
        title: The beginning of every line.
    """

    EVERY = 30.0  # seconds

    def __init__(self, say: Callable[[str], None], title: str = "") -> None:
        self.say = say
        self.title = title
        self._begun = self._shown = (0.0, 0, 0)  # time, step and images

    def begin(self, trainer: Trainer) -> None:
        self._begun = self._shown = (time.perf_counter(), trainer.step, trainer.images)

    def step(self, trainer: Trainer) -> None:
        now, (begun, first, _), (shown, _, images) = time.perf_counter(), self._begun, self._shown
        if now - shown < self.EVERY or trainer.step == first:
            return
        left = (trainer.total_steps - trainer.step) * (now - begun) / (trainer.step - first)
        self.say(
            f"{self.title} epoch {trainer.epoch + 1}/{trainer.recipe.epochs}, batch {trainer.batch}/"
            f"{len(trainer.parts.train)}  loss {trainer.meter.loss:.4f}  "
            f"{(trainer.images - images) / (now - shown):.0f} images/s  about {duration(left)} left"
        )
        self._shown = (now, trainer.step, trainer.images)

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        self._shown = (time.perf_counter(), trainer.step, trainer.images)  # the epoch has a line of its own


class Terminal(Watcher):
    """Prints a line per epoch and, on a terminal, a progress bar; elsewhere also a line every 30 seconds.

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
        self._lines = ProgressLines(self._print, title)

    def begin(self, trainer: Trainer) -> None:
        self._lines.begin(trainer)
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.start()
            now = "compiling the first steps ..." if trainer.parts.engine.captures else ""
            self._task = self._progress.add_task(now, total=trainer.total_steps, completed=trainer.step)
            self._since, self._images = time.perf_counter(), trainer.images

    def step(self, trainer: Trainer) -> None:
        if self._progress is None:
            self._lines.step(trainer)
        elif trainer.batch % 10 == 0:
            self._progress.update(self._task, completed=trainer.step, description=self._now(trainer))

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

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
        self._print(
            f"{self.title} epoch {line['epoch']}/{trainer.recipe.epochs}  loss {line['train_loss']:.4f}  "
            f"{line['split']}: {scores}  density {line['density']:.2%}  explored {line['exploration']:.1%}  "
            f"{line['images_per_second']:.0f} images/s"
        )
        self._lines.epoch(trainer, line)
        self._since, self._images = time.perf_counter(), trainer.images

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()


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
