"""The command line."""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from equipoise.errors import UserError, one_line
from equipoise.files import disk_is_full

app = typer.Typer(
    help="Train neural networks that are sparse from the first step to the last.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)  # names and paths as they are
# Typer brings click along under a name of its own in newer versions; the base of its errors is the same.
CommandError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, such as topology.sparsity=0.95, or a recipe to lay over.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; a new one under runs/ by default.")]
RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]
Profile = Annotated[
    bool, typer.Option("--profile", help="Write a trace of some steps to profile.json in the folder.")
]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events into the run folder.")]
Measure = Annotated[
    int, typer.Option("--measure", min=0, help="Measure gradients every N epochs into measure.jsonl; 0 is never.")
]


@app.command()
def demo(out: Out = None, epochs: Annotated[int, typer.Option(min=1, help="Epochs per arm.")] = 10) -> None:
    """Dense, static, SET, RigL and AGENT at 95 % on the embedded digits: a table and a picture."""
    from equipoise.studies.demo import run_demo

    run_demo(_new_folder(out, "demo"), console, epochs)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe by name (see `equipoise list`) or a YAML file.")],
    overrides: Overrides = None,
    out: Out = None,
    tensorboard: Board = False,
    profile: Profile = False,
    measure: Measure = 0,
) -> None:
    """Train a recipe; the run folder gets metrics, checkpoints and the result.

    On several GPUs or processes: torchrun --nproc-per-node=N -m equipoise train RECIPE.
    """
    from equipoise.training.processes import joined, restarted
    from equipoise.training.profile import Profiler
    from equipoise.training.recipe import apply_overrides, make_recipe, read_recipe
    from equipoise.training.run_folder import RunFolder
    from equipoise.training.trainer import Trainer
    from equipoise.training.watchers import Both

    if restarted() and out is not None and (out / "recipe.yaml").is_file():
        resume(out, tensorboard, measure)
        return
    overlays = [word for word in overrides or [] if "=" not in word]
    raw = apply_overrides(read_recipe(recipe, *overlays), [word for word in overrides or [] if "=" in word])
    made = make_recipe(raw)
    with joined(made.device) as world:
        path = _new_folder(out, f"{Path(recipe).stem}-seed{made.seed}") if world.leads else Path()
        trainer = Trainer(made, world=world)
        _watch(trainer, path, tensorboard, measure)
        if profile and world.leads:
            trainer.watcher = Both(trainer.watcher, Profiler(path / "profile.json"))
        # the last thing that can fail, so that wrong input leaves nothing behind
        trainer.folder = RunFolder.create(path, trainer.raw, made.checkpoint.keep) if world.leads else None
        _run(trainer, path)


@app.command()
def resume(run: RunArgument, tensorboard: Board = False, measure: Measure = 0) -> None:
    """Go on with a run that was interrupted, from its newest sound checkpoint."""
    from equipoise.training.processes import joined
    from equipoise.training.recipe import make_recipe
    from equipoise.training.run_folder import RunFolder
    from equipoise.training.trainer import resume as resume_run

    folder = RunFolder.open(run)
    recipe = make_recipe(folder.recipe())
    folder.store.keep = recipe.checkpoint.keep
    with joined(recipe.device) as world:
        finished = world.broadcast_object(folder.has_result)
        trainer = resume_run(folder, recipe, world=world)
        if trainer.epoch >= recipe.epochs and finished:
            console.print(f"{run} is finished: {trainer.epoch} epochs")
            return
        _watch(trainer, run, tensorboard, measure)
        _run(trainer, run)


@app.command("eval")
def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the newest.")] = False,
    attack: Annotated[
        str | None, typer.Option(help="Also robust accuracy: pgd50x10, ... (see `equipoise list attacks`).")
    ] = None,
    eps: Annotated[float | None, typer.Option(min=0.0, help="Radius of the attack; its own by default.")] = None,
    images: Annotated[int, typer.Option(min=0, help="Attack only so many images; 0 is all.")] = 0,
) -> None:
    """Score a run's checkpoint: plain, with BatchNorm re-estimated, and with averaged weights."""
    from equipoise.display.tables import make_table, percent
    from equipoise.studies.robust import robust_table
    from equipoise.training.processes import joined
    from equipoise.training.run_folder import RunFolder

    if attack is None and (eps is not None or images):
        raise UserError("--eps and --images are about an attack: name one with --attack, such as pgd50x10")
    with joined(str(RunFolder.open(run).recipe().get("device", "auto"))) as world:
        trainer = _open(run, best, world)
        if split not in trainer.parts.loaders:
            raise UserError(f'no split is called "{split}"; there is {", ".join(trainer.parts.loaders)}')
        title = f"{run}, epoch {trainer.epoch}, {split}"
        if attack is not None:
            console.print(robust_table(trainer, split, attack, eps, images, title, console))
            return
        scores = trainer.evaluate(split).items()
        rows = [[way, percent(s.accuracy), f"{s.loss:.4f}", str(s.images)] for way, s in scores]
        console.print(make_table(["", "accuracy", "loss", "images"], rows, title))


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="Only one kind: recipes, models, data, ...")] = None,
) -> None:
    """What can be chosen: recipes, topologies, corrections, models, data, attacks, studies and more."""
    from equipoise.cli.listing import all_kinds, lines_of

    kinds = all_kinds()
    for name in kinds if kind is None else [kind]:
        entries = kinds[name]
        console.print(name, style="bold")
        for line in lines_of(name, entries):
            console.print(line)


@app.command()
def show(run: RunArgument) -> None:
    """Print a run's epochs and how its layers run, and draw its curves to curves.png in its folder."""
    from equipoise.display.figures import draw_run
    from equipoise.display.tables import epochs_table, layers_table
    from equipoise.training.run_folder import RunFolder

    folder = RunFolder.open(run)
    metrics = folder.metrics()
    if not metrics:
        console.print(f"{run} has no finished epoch yet")
        return
    try:
        console.print(epochs_table(metrics, str(run)))
        if layers := (folder.result() or {}).get("layers"):
            console.print(layers_table(layers))
        draw_run(metrics, run / "curves.png", str(run))
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{folder.metrics_file} is not as equipoise writes it: {error!r}") from None
    console.print(f"curves: {run / 'curves.png'}")


@app.command()
def study(
    file: Annotated[str | None, typer.Argument(help="A YAML file or the name of a study; none lists them.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the small result files.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder of the runs and their checkpoints.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the datasets.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; several GPUs are shared out among them.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Only this arm; may be given several times.")] = None,
    seeds: Annotated[str, typer.Option(help="Only these of its seeds, such as 0,1.")] = "",
    list_only: Annotated[bool, typer.Option("--list", help="Say what is there and what is missing.")] = False,
    reproduction: Annotated[
        Path | None, typer.Option(help="Write the page that sets all results beside the paper's, and nothing else.")
    ] = None,
    launcher: Annotated[str, typer.Option(help="local processes, or tasks of a ray cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; one on this machine by default.")] = None,
    other_jobs: Annotated[
        int, typer.Option(min=0, help="Number of other jobs sharing the device; recorded next to the timings.")
    ] = 0,
) -> None:
    """Run what is missing of a study: arms x seeds, one result file each."""
    from equipoise.cli.study import study_command
    from equipoise.training.signals import stoppable

    options = [
        *[("--results", str(results), "results"), ("--work", str(work), "runs"), ("--data", str(data or ""), "")],
        *[("--jobs", str(jobs), "1"), ("--seeds", seeds, ""), ("--other-jobs", str(other_jobs), "0")],
        *[("--launcher", launcher, "local"), ("--address", address or "", "")],
        *[("--only", arm, "") for arm in only or []],
    ]
    words = [word for name, value, usual in options if value != usual for word in (name, value)]
    with stoppable(shlex.join(["equipoise", "study", *([file] if file else []), *words])):
        chosen = (only or [], seeds, list_only, reproduction)
        sound = study_command(file, results, work, data, jobs, *chosen, console, launcher, address, other_jobs)
    if not sound:
        raise typer.Exit(1)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="File to write, such as out.safetensors.")],
    values: Annotated[str, typer.Option(help="Values of packed weights: float32, bf16 or int8.")] = "float32",
    format_: Annotated[str, typer.Option("--format", help="packed, onnx or state_dict (safetensors).")] = "packed",
    weights: Annotated[str, typer.Option(help="plain, reestimated (BatchNorm) or averaged.")] = "plain",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the newest.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a run's network to a small file that `equipoise.load` runs with the sparse kernels."""
    from equipoise.deploy import export as deploy
    from equipoise.deploy.benchmark_table import size
    from equipoise.training.network import network_of

    deploy.check_request(out, format_, values, weights, force)
    deploy.export(network_of(_open(run, best), weights), out, format_, values, force)
    console.print(f"{out}: {size(out.stat().st_size)}")
    if format_ == "state_dict":
        console.print("safetensors; images go in as (x - mean) / std, which the file's metadata has")


@app.command()
def bench(
    file: Annotated[Path, typer.Argument(help="A file that `equipoise export` wrote.")],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each rival; the median counts.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; torch's own by default.")] = None,
) -> None:
    """Size and speed of an exported file beside dense PyTorch and onnxruntime."""
    from equipoise.deploy import benchmark as deploy
    from equipoise.deploy.benchmark_table import report_lines

    for line in report_lines(deploy.bench(file, repeats, threads)):
        console.print(line)


@app.command()
def measure(
    run: RunArgument,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the newest.")] = False,
    batches: Annotated[int, typer.Option(help="Training batches to measure on, at most an epoch's.")] = 50,
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise on the weights.")] = 0.015,
    draws: Annotated[int, typer.Option(help="How often the noise is drawn; the numbers are means.")] = 3,
    against: Annotated[
        str | None, typer.Option(help="Instead of noise, another checkpoint: a file, or best, step-000000100, ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print measure.json instead of tables.")] = False,
) -> None:
    """Measure a checkpoint: variance and correlation of its gradients, c* and ĉ, FLOPs by layer, passes."""
    from equipoise.cli.measure import measure_command

    measure_command(run, _open(run, best), batches, noise, draws, against, as_json, console)


@app.command()
def theory(
    smoothness: Annotated[float | None, typer.Option("--L", help="Smoothness; that of mu = 1/4 by default.")] = None,
    eta: Annotated[float, typer.Option(help="Step size.")] = 0.1,
    c: Annotated[float, typer.Option(help="Weight of the old gradient; AGENT's is gamma times its estimate.")] = 0.1,
    n: Annotated[int, typer.Option("--n", help="Batch size.")] = 128,
    samples: Annotated[int, typer.Option("--N", help="Number of samples.")] = 50_000,
    alpha: Annotated[float, typer.Option(help="Exponent of the theorem's step size.")] = 2 / 3,
    gap: Annotated[float, typer.Option(help="Loss at the start less the least.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="The largest norm of a sample's gradient.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Steps that the bounds are after.")] = 100_000,
    out: Annotated[Path, typer.Option(help="Picture of a small problem and its bounds.")] = Path("theory.png"),
) -> None:
    """Theorem 1 in numbers (nu, nu*, the bounds of AGENT, SVRG and SGD), and a small problem drawn beside them."""
    from equipoise.cli.measure import make_setting, theory_command

    theory_command(make_setting(smoothness, eta, c, n, samples, alpha), gap, sigma, steps, out, console)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder of results, of one study, or of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: claims with their verdicts, curves, costs and tables."""
    from equipoise.report import write_report

    reading = write_report(folder, out)
    for line in reading.problems:
        console.print(line)
    console.print(f"report: {out}")


def _watch(trainer: Any, path: Path, tensorboard: bool, measure: int = 0) -> None:
    """Say what the correction will cost, and set up who looks on."""
    from equipoise.training.watchers import Both, TensorBoard, Terminal, Watcher

    if measure and not trainer.world.alone:
        raise UserError("--measure looks at one process; measure the run afterwards: equipoise measure RUN")
    if not trainer.world.leads:
        return
    watcher: Watcher = Terminal(console, path.name)
    if tensorboard:
        watcher = Both(watcher, TensorBoard(path / "tensorboard"))
    if measure:
        from equipoise.training.measure import MeasureWatcher

        watcher = Both(watcher, MeasureWatcher(path / "measure.jsonl", measure))
    trainer.watcher = watcher
    if trainer.recipe.correction.corrects:
        plan = trainer.parts.correction.plan(len(trainer.parts.train))
        plan.check(trainer.parts.device)
        console.print(f"correction: {plan}")


def _run(trainer: Any, path: Path) -> None:
    from equipoise.display.tables import percent
    from equipoise.training.layer_summary import summary
    from equipoise.training.signals import stoppable

    if trainer.parts.topology.layers:
        console.print(f"weights: {summary(trainer.parts.topology)}")
    with stoppable(f"equipoise resume {path}"):
        result = trainer.run()
    scores = "  ".join(f"{way} {percent(s['accuracy'])}" for way, s in result["test"].items())
    console.print(f"test: {scores}   {path}")


def _open(run: Path, best: bool = False, world: Any = None) -> Any:
    """A trainer standing at the run's newest sound checkpoint, or its best. Nothing in the folder changes."""
    from equipoise.training import checkpoint
    from equipoise.training.recipe import make_recipe
    from equipoise.training.run_folder import RunFolder
    from equipoise.training.trainer import Trainer
    from equipoise.world import ALONE

    folder = RunFolder.open(run)
    trainer = Trainer(make_recipe(folder.recipe()), folder, world=world or ALONE)
    state = checkpoint.load(run / "checkpoints" / "best.safetensors") if best else folder.store.newest()
    if state is None:
        raise UserError(f"{run} has no sound checkpoint yet")
    trainer.load_state_dict(state)
    return trainer


def _new_folder(out: Path | None, name: str) -> Path:
    """The folder asked for, which must not be in use, or the next free one under runs/."""
    from equipoise.training.run_folder import in_use

    if out is not None:
        if in_use(out):
            raise UserError(f"{out} exists and is not empty; name another folder with --out")
        return out
    path, count = Path("runs") / name, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{name}-{count}"
    return path


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: wrong input is one line and exit status 2, never a traceback."""
    warnings.showwarning = _show_warning
    logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it says of a damaged picture, we say
    console.quiet = _rank() != 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show
    words = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(args=words or ["--help"], prog_name="equipoise", standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except CommandError as error:
        _fail(error.format_message() if hasattr(error, "format_message") else str(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:  # a folder that may not be read, a full disk
        _fail(f"{error}; what was written before is intact" if disk_is_full(error) else str(error))
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    line = one_line(message)
    print(f"equipoise: process {_rank()}: {line}" if _rank() else f"equipoise: {line}", file=sys.stderr)
    sys.exit(2)


def _rank() -> int:
    """Which of several processes of torchrun this is; the first speaks for all."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    if console.quiet:
        return
    print(f"equipoise: warning: {one_line(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    main()
