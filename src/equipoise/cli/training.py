"""`equipoise train`, `resume`, `eval` and `show`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.common import (
    AllowCode,
    Best,
    Out,
    Run,
    console,
    import_approved,
    made_recipe,
    new_folder,
    open_run,
)
from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.training import RunFolder, Trainer

POLL = 1.0  # seconds between attempts to lock a run
LOADING, PREPARING = "loading PyTorch ...", "preparing data and model ..."  # shown on terminals
TensorBoardOption = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")]
CSVOption = Annotated[bool, typer.Option("--csv", help="Also write metrics.csv.")]
WandBOption = Annotated[bool, typer.Option("--wandb", help="Also send the metrics to Weights & Biases.")]
MeasureOption = Annotated[
    int, typer.Option("--measure", min=0, help="Measure gradients every N epochs into measure.jsonl; 0 for never.")
]


def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `equipoise list recipes`) or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, such as topology.sparsity=0.95, or another recipe to merge into this one."),
    ] = None,
    out: Out = None,
    csv: CSVOption = False,
    tensorboard: TensorBoardOption = False,
    wandb: WandBOption = False,
    profile: Annotated[bool, typer.Option("--profile", help="Write a trace of a few steps to profile.json.")] = False,
    measure: MeasureOption = 0,
    allow_code: AllowCode = False,
) -> None:
    """Train a recipe and write metrics, checkpoints and the result to a folder.

    With several GPUs or processes: torchrun --nproc-per-node=N -m equipoise train RECIPE.
    """
    with console.status(LOADING):
        from equipoise.training import RunFolder, Trainer
        from equipoise.training.processes import joined, restarted
        from equipoise.training.run_folder import FolderTaken

    words = [recipe, *(overrides or [])]
    if restarted() and out is not None and (out / "recipe.yaml").is_file():
        import_approved({}, [word for word in words if "=" in word])
        resume(out, None, csv, tensorboard, wandb, measure, allow_code)
        return
    made = made_recipe(words, allow_code)
    with joined(made.device) as world:
        name = f"{Path(recipe).stem}-seed{made.seed}"
        path = new_folder(out, name) if world.leads else Path()
        logs = {"csv": csv, "tensorboard": tensorboard, "wandb": wandb}
        with console.status(PREPARING):
            trainer = Trainer(made, world=world)
        _watch(trainer, path, logs, measure, profile)
        # Last, so that wrong input leaves no folder behind.
        while world.leads and trainer.folder is None:
            try:
                trainer.folder = RunFolder.create(path, trainer.raw, made.checkpoint.keep)
            except FolderTaken:  # by another process in the meantime
                path = new_folder(out, name)
                _watch(trainer, path, logs, measure, profile)
        _run(trainer, path)


def resume(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value for the rest of the run, such as epochs=300.")
    ] = None,
    csv: CSVOption = False,
    tensorboard: TensorBoardOption = False,
    wandb: WandBOption = False,
    measure: MeasureOption = 0,
    allow_code: AllowCode = False,
) -> None:
    """Continue a run from its newest valid checkpoint; with epochs=N, train it longer, also if it is finished."""
    with console.status(LOADING):
        from equipoise.training import RunFolder, apply_overrides, make_recipe
        from equipoise.training import resume as resume_run
        from equipoise.training.processes import joined

    folder, typed = RunFolder.open(run), overrides or []
    if typed and os.environ.get("WORLD_SIZE", "1") == "1":
        _wait_for(folder)
    before = folder.recipe()
    import_approved(before, typed, allow_code)
    recipe = make_recipe(apply_overrides(before, typed))
    folder.store.keep = recipe.checkpoint.keep
    with joined(recipe.device) as world:
        finished = world.broadcast_object(folder.has_result)
        with console.status(PREPARING):
            trainer = resume_run(folder, recipe, world=world)
        if trainer.epoch > recipe.epochs:
            raise UserError(f"epochs={recipe.epochs}: {run} has trained {trainer.epoch} epochs already")
        if trainer.epoch == recipe.epochs and finished:
            console.print(
                f"{run} is finished: {trainer.epoch} epochs; `equipoise resume {run} epochs=N` trains longer"
            )
            return
        if recipe.epochs != (planned := make_recipe(before).epochs):
            console.print(
                f"epochs: {planned} -> {recipe.epochs}; from epoch {trainer.epoch + 1} on, learning rate, topology "
                f"updates and coefficients follow the schedules of a run of {recipe.epochs} epochs"
            )
        if world.leads and typed and trainer.raw != before:
            folder.extend(trainer.raw)
        _watch(trainer, run, {"csv": csv, "tensorboard": tensorboard, "wandb": wandb}, measure)
        _run(trainer, run)


def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    best: Best = False,
    attack: Annotated[
        str | None,
        typer.Option(help="Also attack the images, such as pgd50x10 (see `equipoise list attacks`)."),
    ] = None,
    eps: Annotated[float | None, typer.Option(min=0.0, help="Radius of the attack. Default: the attack's.")] = None,
    images: Annotated[int, typer.Option(min=0, help="Number of images to attack; 0 for all.")] = 0,
    allow_code: AllowCode = False,
) -> None:
    """Evaluate a checkpoint: plain, with recalibrated BatchNorm, and with averaged weights (ema)."""
    from equipoise.display.tables import make_table, percent
    from equipoise.studies.robust import robust_table
    from equipoise.training import RunFolder
    from equipoise.training.processes import joined

    if attack is None and (eps is not None or images):
        raise UserError("--eps and --images need an attack, such as --attack pgd50x10")
    with joined(str(RunFolder.open(run).recipe().get("device", "auto"))) as world:
        trainer = open_run(run, best, world, allow_code)
        if split not in trainer.parts.loaders:
            raise UserError(f'no split is called "{split}"; choose from {", ".join(trainer.parts.loaders)}')
        title = f"{run}, epoch {trainer.epoch}, {split}"
        if attack is not None:
            console.print(robust_table(trainer, split, attack, eps, images, title, console))
            return
        scores = trainer.evaluate(split).items()
        rows = [[name, percent(s.accuracy), f"{s.loss:.4f}", str(s.images)] for name, s in scores]
        console.print(make_table(["", "accuracy", "loss", "images"], rows, title))


def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of several runs, such as runs.")],
    html: Annotated[
        bool, typer.Option("--html", help="Also write the run as a page, report.html in its folder.")
    ] = False,
) -> None:
    """Print the epochs and layers of a run, and draw its curves to curves.png in its folder; or list runs."""
    from equipoise.display.figures import draw_run
    from equipoise.display.tables import epochs_table, layers_table
    from equipoise.training import RunFolder
    from equipoise.training.run_folder import find_runs
    from equipoise.training.run_list import method_of, runs_table

    if not os.path.isfile(run / "recipe.yaml") and (runs := find_runs(run)):
        console.print(runs_table(runs, run))
        return
    folder = RunFolder.open(run)
    metrics = folder.metrics()
    if not metrics:
        console.print(f"{run} has no finished epoch yet")
        return
    try:
        console.print(epochs_table(metrics, str(run)))
        if layers := (folder.result() or {}).get("layers"):
            console.print(layers_table(layers))
        draw_run(metrics, run / "curves.png", f"{run.resolve().name}: {method_of(folder.recipe())}")
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder.metrics_file} was not written by equipoise: {error!r}") from None
    console.print(f"curves: {run / 'curves.png'}")
    if html:
        from equipoise.report import write_report

        for problem in write_report(run, run / "report.html").problems:
            console.print(problem)
        console.print(f"page: {run / 'report.html'}")


def _wait_for(folder: RunFolder) -> None:
    """Lock a run that is to be extended, after another process that trains it."""
    from equipoise.training.run_folder import RunBusy

    try:
        folder.claim()
    except RunBusy as busy:
        console.print(f"{busy}; waiting for it to end")
        while True:
            time.sleep(POLL)
            with suppress(RunBusy):
                folder.claim()
                break


def _watch(trainer: Trainer, path: Path, logs: Mapping[str, bool], measure: int, profile: bool = False) -> None:
    """Set the watchers of a run, and refuse a correction that does not fit into memory."""
    from equipoise.training.loggers import CSV, TensorBoard, WeightsAndBiases
    from equipoise.training.measure import MeasureWatcher
    from equipoise.training.profile import Profiler
    from equipoise.training.watchers import Terminal, Watcher, Watchers

    if measure and not trainer.world.alone:
        raise UserError("--measure needs a single process; measure the run afterwards with `equipoise measure RUN`")
    if not trainer.world.leads:
        return
    watchers: list[Watcher] = [Terminal(console, path.name)]
    if logs["csv"]:
        watchers.append(CSV(path / "metrics.csv"))
    if logs["tensorboard"]:
        watchers.append(TensorBoard(path / "tensorboard"))
    if logs["wandb"]:
        watchers.append(WeightsAndBiases(path))
    if measure:
        watchers.append(MeasureWatcher(path / "measure.jsonl", measure))
    if profile:
        watchers.append(Profiler(path / "profile.json"))
    trainer.watcher = Watchers(*watchers)
    if trainer.recipe.correction.corrects:
        trainer.parts.correction.estimate_cost(len(trainer.parts.train)).check(trainer.parts.device)


def _run(trainer: Trainer, path: Path) -> None:
    from equipoise.display.tables import percent
    from equipoise.training.build_recipe import code_in
    from equipoise.training.layer_summary import summary
    from equipoise.training.signals import stoppable

    if trainer.recipe.correction.corrects:
        console.print(f"correction: {trainer.parts.correction.estimate_cost(len(trainer.parts.train))}")
    if trainer.parts.topology.layers:
        console.print(f"weights: {summary(trainer.parts.topology)}")
    with stoppable(f"equipoise resume {path}{' --allow-code' if code_in(trainer.raw) else ''}"):
        result = trainer.run()
    scores = "  ".join(f"{name} {percent(s['accuracy'])}" for name, s in result["test"].items())
    console.print(f"test: {scores}   {path}")
