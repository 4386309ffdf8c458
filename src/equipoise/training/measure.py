"""Gradient statistics of a run, at a checkpoint or after every epoch of training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.analysis.gradient_statistics import (
    NOISE,
    active_vector_of,
    is_packed,
    measure_against,
    perturbed,
    snapshot_of,
)
from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.batches import Batches
from equipoise.correction.snapshot import Snapshot
from equipoise.errors import UserError
from equipoise.files import open_to_append, write_whole
from equipoise.modules import preserved_modes
from equipoise.seeds import derive
from equipoise.training.precision import autocast
from equipoise.training.run_folder import read_epochs, strict, strict_json
from equipoise.training.trainer import Trainer
from equipoise.training.watchers import Watcher

BATCHES = 50
DRAWS = 3  # of the noise, as the paper's three replicates
# the statistics that depend on the noise
OF_NOISE = ("variance_old", "correlation", "correlation_of_batches", "correlation_of_pairs", "c_star", "c_hat")


def measure_trainer(
    trainer: Trainer,
    batches: int = BATCHES,
    noise: float = NOISE,
    *,
    old: Mapping[str, Tensor] | None = None,
    draws: int = DRAWS,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure the gradients of a run at its current weights against old weights.

    The batches are the first of the next epoch, augmented, with the precision and the objective of the training. An
    attack runs once, on the current weights, and all gradients are of the images that it found, as in a corrected
    step.

    Args:
        trainer: The run.
        batches: Number of batches, at most the batches of an epoch.
        noise: Standard deviation of the noise that makes old weights from the current ones.
        old: Old weights by name, instead of noise.
        draws: How often the noise is drawn. The numbers are means over the draws.
        on_batch: Called before every batch.

    Returns:
        `Measurement.report` and four more entries, which are `None` with `old`: `noise`, `draws`, `deviation` (the
        standard deviations over the draws) and `everywhere` (the numbers with noise on inactive weights too; `None`
        in packed storage, which has no inactive weights).
    """
    if batches < 2:
        raise UserError(f"batches={batches}: a variance over batches needs at least 2 of them")
    if draws < 1:
        raise UserError(f"draws={draws}: the noise is drawn at least once")
    model = trainer.parts.model
    vector = active_vector_of(model, trainer.parts.topology)
    prepared = _prepared(trainer, batches, on_batch)
    if old is not None:
        [report] = _reports(trainer, prepared, [snapshot_of(model, old)], vector)
        return strict(report | dict.fromkeys(("noise", "draws", "deviation", "everywhere")))

    def moved(everywhere: bool) -> list[Snapshot]:
        seeds = [derive(0, "measure", i) for i in range(draws)]
        return [perturbed(model, vector, noise, each, everywhere) for each in seeds]

    inactive = any(index is not None for index in vector.indices)
    apart = inactive and not is_packed(vector)  # in a dense model both kinds of noise are the same
    snapshots = moved(everywhere=False) + (moved(everywhere=True) if apart else [])
    reports = _reports(trainer, prepared, snapshots, vector)
    active, everywhere = (
        {**_mean(part), "deviation": _deviations(part)} for part in (reports[:draws], reports[-draws:])
    )
    known = None if is_packed(vector) else {key: everywhere[key] for key in (*OF_NOISE, "deviation")}
    return strict(active | {"noise": noise, "draws": draws, "everywhere": known})


def _reports(
    trainer: Trainer, batches: Batches, snapshots: Sequence[Snapshot], vector: ActiveVector
) -> list[dict[str, Any]]:
    """Measure against every snapshot."""
    recipe, parts = trainer.recipe, trainer.parts

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        with autocast(recipe.precision, parts.device):
            return recipe.objective.loss(model, *batch)[0]

    with preserved_modes(parts.model):
        parts.model.train()  # batch statistics, as in training
        found = measure_against(parts.model, loss, batches, snapshots, vector, of=len(parts.train))
    return [each.report() for each in found]


def _mean(values: Sequence[Any]) -> Any:
    """Average reports number by number; `None` if one of them has no number."""
    if isinstance(values[0], Mapping):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    if None in values:
        return None
    same = all(value == values[0] for value in values)  # an integer stays an integer
    return values[0] if same else math.fsum(values) / len(values)


def _deviations(reports: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Standard deviations over the draws (ddof = 1) of the numbers that all reports have."""
    if len(reports) < 2:
        return None
    values = {key: [report[key] for report in reports] for key in OF_NOISE}
    return {key: statistics.stdev(found) for key, found in values.items() if None not in found}


def _prepared(trainer: Trainer, count: int, on_batch: Callable[[], None]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the first batches of the next epoch as steps would get them. Attacks have their own generator."""
    recipe, parts = trainer.recipe, trainer.parts
    for i, (x, y) in enumerate(islice(parts.train.epoch(trainer.epoch), count)):
        on_batch()
        generator = None
        if recipe.objective.attack_passes:
            generator = torch.Generator(parts.device).manual_seed(derive(recipe.seed, "measure", trainer.step, i))
        with autocast(recipe.precision, parts.device):
            batch = recipe.objective.prepare(parts.model, x, y, generator)
        yield batch


class MeasureWatcher(Watcher):
    """Measures gradients after epochs, against the weights of one epoch before.

    Every measurement is a line of measure.jsonl: epoch, step, learning rate, and the result of `measure_trainer`. The
    run itself is not affected. An epoch in the middle of which a run is resumed is not measured, because the weights
    of its beginning are lost.

    Args:
        file: The file that lines are appended to.
        every: Epochs between measurements.
        batches: Number of batches that are measured.
    """

    def __init__(self, file: Path, every: int = 1, batches: int = BATCHES) -> None:
        if every < 1:
            raise UserError(f"every={every}: epochs between measurements, at least 1")
        self.file = file
        self.every = every
        self.batches = batches
        self._before: Snapshot | None = None

    def begin(self, trainer: Trainer) -> None:
        """Remove the lines of epochs that a resumed run repeats."""
        if self.file.exists():
            kept = [line for line in read_epochs(self.file) if line["epoch"] <= trainer.epoch]
            write_whole(self.file, "".join(strict_json(line) + "\n" for line in kept).encode())
        if trainer.batch == 0:
            self._remember(trainer)

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if self._before is not None and trainer.epoch % self.every == 0:
            found = measure_trainer(trainer, self.batches, old=self._before.tensors)
            moment = {key: line[key] for key in ("epoch", "step", "learning_rate")}
            with open_to_append(self.file) as file:
                file.write(strict_json(moment | found) + "\n")
        self._remember(trainer)

    def _remember(self, trainer: Trainer) -> None:
        """Copy the weights at the beginning of an epoch that is measured at its end."""
        if (trainer.epoch + 1) % self.every == 0:
            self._before = self._before or Snapshot(trainer.parts.model)
            self._before.take()
