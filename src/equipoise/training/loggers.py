"""Watchers that write the metrics of every epoch for other programs: CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.training.watchers import Watcher

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


class CSV(Watcher):
    """Writes all metrics to a CSV file, one row per epoch; the file is complete after every epoch.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        rows = [flatten(each) for each in trainer.history]  # also the epochs before a resumed run
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self._file, text.getvalue().encode())


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


class WeightsAndBiases(Watcher):
    """Sends all metrics to Weights & Biases (extra `wandb`), or writes them to the folder if WANDB_MODE=offline.

    A resumed run continues the same run there, whose identifier is in the file wandb-id.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("Weights & Biases is not installed; pip install 'equipoise[wandb]'") from None
        self._wandb = wandb
        self._folder = folder
        self._run: Any = None

    def begin(self, trainer: Trainer) -> None:
        file = self._folder / "wandb-id"
        if not file.is_file():
            write_whole(file, secrets.token_hex(8).encode())
        self._run = self._wandb.init(
            project="equipoise",
            name=self._folder.name,
            id=file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(self._folder),
            config=trainer.raw,
            settings=self._wandb.Settings(console="off"),
        )

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        self._run.log(flatten(line), step=line["epoch"])

    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


def flatten(line: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested metrics to names such as `scores/plain/accuracy`; values that are not numbers are left out."""
    flat: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{key}"] = float(value)
    return flat
