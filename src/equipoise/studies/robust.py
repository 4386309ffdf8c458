"""Clean and robust accuracy of a run, three ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from equipoise.training.evaluate import Batches, three_ways
from equipoise.training.trainer import Trainer
from equipoise.world import World

JUDGES: Catalogue[Callable[..., Any]] = Catalogue("attack", {**ATTACKS, "autoattack": autoattack})
"""The attacks that `equipoise eval --attack` takes by name."""

EPS = 8 / 255  # of AutoAttack, as of the others
AT_ONCE = 100  # images attacked together on a CPU, so that a bar over many restarts of many steps moves


@dataclass(frozen=True)
class Judge:
    """An attack that is ready to run, from the same random starts on every model. attack: None is AutoAttack."""

    attack: PGD | None
    norm: str
    eps: float
    seed: int

    def run(self, model: nn.Module, batches: Batches, on_progress: Progress) -> RobustResult:
        if self.attack is None:
            return autoattack(model, batches, self.eps, self.norm, seed=self.seed % 2**32, on_progress=on_progress)
        generator = torch.Generator(next(model.parameters()).device).manual_seed(self.seed)
        return robust_accuracy(model, batches, self.attack, generator, on_progress)

    @property
    def radius(self) -> str:
        """As people write it: in levels of 255 where it is so many."""
        levels = round(self.eps * 255)
        number = f"{levels}/255" if levels and abs(levels / 255 - self.eps) < 1e-9 else f"{self.eps:g}"
        return f"{'L∞' if self.norm == 'linf' else 'L2'} {number}"


def make_judge(attack: str, eps: float | None = None, seed: int = 0) -> Judge:
    """An attack by name with its own radius or another; a wrong name or radius is an error here."""
    make = JUDGES[attack]
    if make is autoattack:
        return Judge(None, "linf", EPS if eps is None else eps, seed)
    chosen: PGD = make() if eps is None else make(eps)
    return Judge(chosen, chosen.norm, chosen.eps, seed)


def robust_table(
    trainer: Trainer, split: str, attack: str, eps: float | None, images: int, title: str, console: Console
) -> Table:
    """Attack the plain, the re-estimated and the averaged model, each with the same random starts.

    Of several processes each attacks its share of the images, from starts of its own.
    eps: the attack's radius, or None for its own. images: how many of the split's; 0 is all. A robust accuracy that
    is likely too high, because gradients are masked, is marked with "!"; the warning that comes with it says why.
    """
    parts = trainer.parts
    world = trainer.world
    purpose = ["evaluation"] if world.alone else ["evaluation", str(world.rank)]
    judge = make_judge(attack, eps, derive(trainer.recipe.seed, *purpose))
    loader = parts.loaders[split]
    if 0 < images < world.size:
        raise UserError(f"--images {images}: at least one for each of {world.size} processes")
    # of the first so many images, those that are this process's
    count = min(len(range(world.rank, images, world.size)) or loader.order.count, loader.order.count)
    at_once = AT_ONCE if parts.device.type == "cpu" else count
    results = {}
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        for score in three_ways(parts.model, trainer.recalibration_images, parts.ema):
            task = bar.add_task(f"{attack}, {score}", total=count)

            def advance(result: RobustResult, task: TaskID = task) -> None:
                bar.update(task, completed=result.images)

            found = judge.run(parts.model, first(count, loader.epoch(0), at_once), advance)
            results[score] = of_all(found, world)
    rows = [[score, percent(r.clean), _marked(r), str(r.images)] for score, r in results.items()]
    return make_table(["", "clean", "robust", "images"], rows, f"{title}, {attack} within {judge.radius}")


def of_all(result: RobustResult, world: World) -> RobustResult:
    """The result over the images of all processes."""
    if world.alone:
        return result
    shares = world.all_gather_object(result)
    images = sum(share.images for share in shares)
    clean, robust = (
        sum(round(getattr(share, name) * share.images) for share in shares) / images for name in ("clean", "robust")
    )
    return RobustResult(clean, robust, images, next((share.caution for share in shares if share.caution), ""))


def first(images: int, batches: Iterable[tuple[Tensor, Tensor]], at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first so many images, at most `at_once` in a batch."""
    left = images
    for x, y in batches:
        yield from zip(x[:left].split(at_once), y[:left].split(at_once), strict=True)
        left -= len(y)
        if left <= 0:
            return


def _marked(result: RobustResult) -> str:
    return f"{percent(result.robust)} !" if result.caution else percent(result.robust)
