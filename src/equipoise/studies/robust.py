"""Clean and robust accuracy of a run, for each of its scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID
from rich.table import Table
from torch import Tensor, nn

from equipoise.catalogue import Catalogue
from equipoise.display.tables import make_table, percent
from equipoise.errors import UserError
from equipoise.objectives import ATTACKS, PGD, RobustResult, autoattack, robust_accuracy
from equipoise.objectives.robust_accuracy import Progress
from equipoise.seeds import derive
from equipoise.training import signals
from equipoise.training.evaluate import Batches, three_ways
from equipoise.training.trainer import Trainer
from equipoise.world import World

JUDGES: Catalogue[Callable[..., Any]] = Catalogue("attack", {**ATTACKS, "autoattack": autoattack})
"""The attacks that `equipoise eval --attack` takes by name."""

EPS = 8 / 255  # AutoAttack's default radius
CPU_BATCH = 100  # images attacked at a time on a CPU, so that the progress bar moves


@dataclass(frozen=True)
class Judge:
    """An attack with the same random starts on every model.

    Attributes:
        attack: The attack; `None` for AutoAttack.
        norm: `linf` or `l2`.
        eps: The radius.
        seed: The seed of the random starts.
    """

    attack: PGD | None
    norm: str
    eps: float
    seed: int

    def run(self, model: nn.Module, batches: Batches, on_progress: Progress) -> RobustResult:
        """Attack a model and return its clean and robust accuracy."""
        if self.attack is None:
            return autoattack(model, batches, self.eps, self.norm, seed=self.seed % 2**32, on_progress=on_progress)
        generator = torch.Generator(next(model.parameters()).device).manual_seed(self.seed)
        return robust_accuracy(model, batches, self.attack, generator, on_progress)

    @property
    def radius(self) -> str:
        """Norm and radius for people, such as `L∞ 8/255`."""
        levels = round(self.eps * 255)
        number = f"{levels}/255" if levels and abs(levels / 255 - self.eps) < 1e-9 else f"{self.eps:g}"
        return f"{'L∞' if self.norm == 'linf' else 'L2'} {number}"


def make_judge(attack: str, eps: float | None = None, seed: int = 0) -> Judge:
    """Make an attack by its name in `JUDGES`, with a radius or its default one.

    Raises:
        UserError: If the name is unknown or the radius is wrong.
    """
    make = JUDGES[attack]
    if make is autoattack:
        return Judge(None, "linf", EPS if eps is None else eps, seed)
    chosen: PGD = make() if eps is None else make(eps)
    return Judge(chosen, chosen.norm, chosen.eps, seed)


def robust_scores(trainer: Trainer, attack: str, images: int) -> dict[str, dict[str, Any]]:
    """Return clean and robust accuracy on the first test images (0 for all), by score."""
    parts = trainer.parts
    judge = make_judge(attack, seed=derive(trainer.recipe.seed, "evaluation"))
    loader = parts.loaders["test"]
    count = min(images or loader.order.count, loader.order.count)
    found = {}
    with closing(three_ways(parts.model, trainer.recalibration_images, parts.ema)) as scores:
        for score in scores:
            result = judge.run(parts.model, first(count, loader.epoch(0), count), lambda _: signals.check())
            found[score] = {"clean": result.clean, "robust": result.robust, "images": result.images}
    return found


def robust_table(
    trainer: Trainer, split: str, attack: str, eps: float | None, images: int, title: str, console: Console
) -> Table:
    """Return a table of clean and robust accuracy by score, and show a progress bar meanwhile.

    If there are several processes, each attacks its share of the images with its own random starts. A robust accuracy
    that is probably too high, because gradients are masked, is marked with "!"; a warning gives the reason.

    Args:
        trainer: The trainer of a run.
        split: The images to attack.
        attack: A name in `JUDGES`.
        eps: The radius; `None` for the attack's default.
        images: Number of images; 0 for all.
        title: The first part of the table's title.
        console: Where the progress bar is shown.
    """
    parts, world = trainer.parts, trainer.world
    purpose = ["evaluation"] if world.alone else ["evaluation", str(world.rank)]
    judge = make_judge(attack, eps, derive(trainer.recipe.seed, *purpose))
    loader = parts.loaders[split]
    if 0 < images < world.size:
        raise UserError(f"--images {images}: at least one for each of {world.size} processes")
    # this process's share of the first images
    count = min(len(range(world.rank, images, world.size)) or loader.order.count, loader.order.count)
    at_once = CPU_BATCH if parts.device.type == "cpu" else count
    rows = []
    with (
        Bar(console=console, transient=True, disable=not console.is_terminal) as bar,
        closing(three_ways(parts.model, trainer.recalibration_images, parts.ema)) as scores,
    ):
        for score in scores:
            task = bar.add_task(f"{attack}, {score}", total=count)

            def advance(result: RobustResult, task: TaskID = task) -> None:
                bar.update(task, completed=result.images)

            found = _over_processes(judge.run(parts.model, first(count, loader.epoch(0), at_once), advance), world)
            mark = " !" if found.caution else ""
            rows.append([score, percent(found.clean), percent(found.robust) + mark, str(found.images)])
    return make_table(["", "clean", "robust", "images"], rows, f"{title}, {attack} within {judge.radius}")


def _over_processes(result: RobustResult, world: World) -> RobustResult:
    """Combine the results of all processes."""
    if world.alone:
        return result
    shares = world.all_gather_object(result)
    images = sum(share.images for share in shares)
    clean, robust = (
        sum(round(getattr(share, name) * share.images) for share in shares) / images for name in ("clean", "robust")
    )
    return RobustResult(clean, robust, images, next((share.caution for share in shares if share.caution), ""))


def first(images: int, batches: Iterable[tuple[Tensor, Tensor]], at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first images in batches of at most `at_once`."""
    left = images
    for x, y in batches:
        yield from zip(x[:left].split(at_once), y[:left].split(at_once), strict=True)
        left -= len(y)
        if left <= 0:
            return
