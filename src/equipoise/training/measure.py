"""Gradients of a run measured: at a checkpoint, or epoch by epoch while it trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.analysis.gradient_statistics import (
    GAMMA,
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
from equipoise.seeds import derive
from equipoise.training.precision import autocast
from equipoise.training.run_folder import read_epochs, strict, strict_json
from equipoise.training.trainer import Trainer
from equipoise.training.watchers import Watcher

BATCHES = 50
DRAWS = 3  # of the noise, as the paper has three replicates
# what depends on the noise; the gradients of now do not
OF_NOISE = ("variance_old", "correlation", "correlation_of_batches", "correlation_of_pairs", "c_star", "c_hat")


def measure_trainer(
    trainer: Trainer,
    batches: int = BATCHES,
    noise: float = NOISE,
    *,
    old: Mapping[str, Tensor] | None = None,
    gamma: float = GAMMA,
    seed: int = 0,
    draws: int = DRAWS,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`measure_gradients` of a run where it stands: `Measurement.report`, and `noise`.

    The batches are the first of the coming epoch, augmented, in the precision of the training and with its objective;
    an attack is run once on the weights of now, and all gradients are of the images it found, as in a corrected
    step. batches: how many, at most those of an epoch. old: other weights to measure against, by name; by default
    those of now with `noise`, drawn from `seed` so many times: the numbers are means over the draws, and under
    `everywhere` stand those with noise on inactive weights too (None in packed storage, which has none), each with
    its standard deviation over the draws under `deviation`. These four are None where there was no noise. on_batch:
    called before every batch.
    """
    if batches < 2:
        raise UserError(f"batches={batches}: a variance over batches needs at least 2 of them")
    if draws < 1:
        raise UserError(f"draws={draws}: the noise is drawn at least once")
    model = trainer.parts.model
    vector = active_vector_of(model, trainer.parts.topology)
    prepared = _prepared(trainer, batches, on_batch)
    if old is not None:
        [report] = _reports(trainer, prepared, [snapshot_of(model, old)], vector, gamma)
        return strict(report | dict.fromkeys(("noise", "draws", "deviation", "everywhere")))

    def moved(everywhere: bool) -> list[Snapshot]:
        seeds = [derive(seed, "measure", i) for i in range(draws)]
        return [perturbed(model, vector, noise, each, everywhere) for each in seeds]

    inactive = any(index is not None for index in vector.indices)
    apart = inactive and not is_packed(vector)  # in a dense model both kinds of noise are one
    snapshots = moved(everywhere=False) + (moved(everywhere=True) if apart else [])
    reports = _reports(trainer, prepared, snapshots, vector, gamma)
    active, everywhere = (
        {**_mean(part), "deviation": _deviations(part)} for part in (reports[:draws], reports[-draws:])
    )
    known = None if is_packed(vector) else {key: everywhere[key] for key in (*OF_NOISE, "deviation")}
    return strict(active | {"noise": noise, "draws": draws, "everywhere": known})


def _reports(
    trainer: Trainer, batches: Batches, snapshots: Sequence[Snapshot], vector: ActiveVector, gamma: float
) -> list[dict[str, Any]]:
    """One for every snapshot."""
    recipe, parts = trainer.recipe, trainer.parts

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        with autocast(recipe.precision, parts.device):
            return recipe.objective.loss(model, *batch)[0]

    with _training_mode(parts.model):
        found = measure_against(parts.model, loss, batches, snapshots, vector, of=len(parts.train))
    return [each.report(gamma) for each in found]


def _mean(values: Sequence[Any]) -> Any:
    """Of reports of the same kind, number by number; None where one of them has none."""
    if isinstance(values[0], Mapping):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    if None in values:
        return None
    same = all(value == values[0] for value in values)  # a count stays one
    return values[0] if same else math.fsum(values) / len(values)


def _deviations(reports: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Over the draws of the noise, ddof = 1; of what all of them have."""
    if len(reports) < 2:
        return None
    values = {key: [report[key] for report in reports] for key in OF_NOISE}
    return {key: statistics.stdev(found) for key, found in values.items() if None not in found}


def _prepared(trainer: Trainer, count: int, on_batch: Callable[[], None]) -> Iterator[tuple[Tensor, ...]]:
    """The coming epoch's first batches as steps would get them; attacks draw from a generator of their own."""
    recipe, parts = trainer.recipe, trainer.parts
    for i, (x, y) in enumerate(islice(parts.train.epoch(trainer.epoch), count)):
        on_batch()
        generator = None
        if recipe.objective.attack_passes:
            generator = torch.Generator(parts.device).manual_seed(derive(recipe.seed, "measure", trainer.step, i))
        with autocast(recipe.precision, parts.device):
            batch = recipe.objective.prepare(parts.model, x, y, generator)
        yield batch


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Batch statistics, as training has them; then each module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class MeasureWatcher(Watcher):
    """Measures at the end of every so many epochs, against the weights of one epoch before.

    Every measurement is a line of measure.jsonl: epoch, step, learning rate, and what `measure_trainer` returns.
    The run itself goes on as if nobody had measured. A run that is resumed within an epoch has no weights of the
    epoch's beginning, so that one is not measured.
    """

    def __init__(self, file: Path, every: int = 1, batches: int = BATCHES) -> None:
        if every < 1:
            raise UserError(f"every={every}: measure every so many epochs, at least 1")
        self.file = file
        self.every = every
        self.batches = batches
        self._before: Snapshot | None = None

    def begin(self, trainer: Trainer) -> None:
        """Leave out the lines of epochs that a resumed run does again."""
        if self.file.exists():
            kept = [line for line in read_epochs(self.file) if line["epoch"] <= trainer.epoch]
            self.file.write_text("".join(strict_json(line) + "\n" for line in kept), encoding="utf-8")
        if trainer.batch == 0:
            self._remember(trainer)

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if self._before is not None and trainer.epoch % self.every == 0:
            found = measure_trainer(trainer, self.batches, old=self._before.tensors)
            place = {key: line[key] for key in ("epoch", "step", "learning_rate")}
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(strict_json(place | found) + "\n")
        self._remember(trainer)

    def _remember(self, trainer: Trainer) -> None:
        """The weights at the beginning of an epoch at whose end they are needed."""
        if (trainer.epoch + 1) % self.every == 0:
            self._before = self._before or Snapshot(trainer.parts.model)
            self._before.take()
