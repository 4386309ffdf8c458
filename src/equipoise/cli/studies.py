"""`equipoise demo`, `study` and `report`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.common import AllowCode, Out, console, modules_here, new_folder
from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.studies.launch import Launcher
    from equipoise.studies.runner import Job


def demo(
    out: Out = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per run.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per arm.")] = 3,
) -> None:
    """Train dense, static, SET, RigL, AGENT and the fast recipe on the embedded digits: a table and a figure."""
    from equipoise.studies.demo import run_demo

    run_demo(new_folder(out, "demo"), console, epochs, seeds)


def study(
    file: Annotated[str | None, typer.Argument(help="Name of a study or a YAML file. Default: list names.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder of the runs and their checkpoints.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the datasets.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes. They share the GPUs evenly.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Run only this arm; can be repeated.")] = None,
    seeds: Annotated[str, typer.Option(help="Run only these seeds, such as 0,1.")] = "",
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the state of every run and an estimate of the time; run nothing.")
    ] = False,
    reproduction: Annotated[
        Path | None, typer.Option(help="Write a page that compares all results with the paper's, and run nothing.")
    ] = None,
    launcher: Annotated[str, typer.Option(help="Where to run: local (processes) or ray (a Ray cluster).")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster. Default: a local one.")] = None,
    other_jobs: Annotated[
        int, typer.Option(min=0, help="Number of other jobs sharing the device; recorded next to the timings.")
    ] = 0,
    allow_code: AllowCode = False,
) -> None:
    """Run the missing runs of a study (arms x seeds) and write one result file for each."""
    from equipoise.report.verdict_lines import verdict_lines
    from equipoise.studies.design import read_study
    from equipoise.studies.results import slug
    from equipoise.studies.runner import jobs_of, run_study
    from equipoise.training.signals import stoppable

    _check_launcher(launcher, address)
    if reproduction is not None:
        _write_reproduction(results, reproduction)
        return
    if file is None:
        _list_studies()
        return
    if allow_code:
        modules_here()
    design = read_study(file, allow_code)
    arms = list(dict.fromkeys(only or []))
    chosen = jobs_of(design, results, work, arms, parse_seeds(seeds), data, other_jobs, allow_code)
    if list_only:
        _list_jobs(chosen)
        return
    options = [
        *[("--results", str(results), "results"), ("--work", str(work), "runs"), ("--data", str(data or ""), "")],
        *[("--jobs", str(jobs), "1"), ("--seeds", seeds, ""), ("--other-jobs", str(other_jobs), "0")],
        *[("--launcher", launcher, "local"), ("--address", address or "", "")],
        *[("--only", arm, "") for arm in arms],
    ]
    words = [word for name, value, default in options if value != default for word in (name, value)]
    words += ["--allow-code"] if allow_code else []
    again = shlex.join(["equipoise", "study", file, *words])
    with stoppable(again):
        complete = run_study(design, chosen, results, make_launcher(launcher, jobs, address), console.print)
    folder = results / slug(design.name)
    for line in verdict_lines(folder):
        console.print(line)
    if not complete:
        console.print(f"next: {again}, which runs what failed")
        raise typer.Exit(1)
    console.print(f"next: equipoise report {shlex.quote(str(folder))} -o report.html")


def _check_launcher(launcher: str, address: str | None) -> None:
    if launcher not in ("local", "ray"):
        raise UserError(f"--launcher {launcher}: expected local or ray")
    if address is not None and launcher != "ray":
        raise UserError("--address is the address of a Ray cluster; use it with --launcher ray")


def _write_reproduction(results: Path, page: Path) -> None:
    from equipoise.report.reproduction import write_page

    for problem in write_page(results, page):
        console.print(problem)
    console.print(f"written: {page}")


def _list_studies() -> None:
    from equipoise.studies.design import packaged_studies, read_design

    for name in packaged_studies():
        console.print(f"{name:<28}{read_design(name).title}")


def _list_jobs(jobs: list[Job]) -> None:
    """Print the state of every job, and an estimate of the time that the unfinished ones take."""
    from equipoise.display.tables import duration
    from equipoise.studies.estimate import estimate
    from equipoise.studies.runner import state

    left = estimate(jobs)
    for job in jobs:
        seconds = left.get(str(job))
        console.print(f"{job}: {state(job)}" + (f", about {duration(seconds)}" if isinstance(seconds, float) else ""))
    known = [seconds for seconds in left.values() if isinstance(seconds, float)]
    total = f"; about {duration(sum(known))} of training on this device" if known else ""
    console.print(f"{len(left)} of {len(jobs)} to run{total}")
    if reasons := [reason for reason in left.values() if isinstance(reason, str)]:
        console.print(f"no estimate for {len(reasons)}: {reasons[0]}")


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of results, of one study, or of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML page: claims with their verdicts, curves, costs and tables."""
    from equipoise.report import write_report

    for problem in write_report(folder, out).problems:
        console.print(problem)
    console.print(f"report: {out}")


def make_launcher(name: str, jobs: int, address: str | None) -> Launcher:
    """Return the launcher of a study by name."""
    from equipoise.studies.launch import here, processes

    if name == "ray":
        from equipoise.studies.ray_launcher import on_ray

        return on_ray(address, resources)
    return here if jobs == 1 else processes(jobs)


def resources(job: Job, has_gpus: bool) -> dict[str, float]:
    """Return the resources of a job: a core, another one per process that reads images, and a GPU if it uses one."""
    from equipoise.training import make_recipe

    recipe = make_recipe(job.recipe)
    readers = recipe.data.workers if recipe.data.name in ("folder", "imagenet") else 0
    wants_gpu = recipe.device.startswith("cuda") or (recipe.device == "auto" and has_gpus)
    return {"num_cpus": 1 + readers, "num_gpus": float(wants_gpu)}


def parse_seeds(text: str) -> list[int]:
    """Parse `0,1`; an empty text is an empty list."""
    words = [word.strip() for word in text.split(",")] if text else []
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 19)]
    if wrong:
        raise UserError(f'--seeds {text}: "{wrong[0]}" is not a seed; write them as 0,1')
    return list(dict.fromkeys(map(int, words)))
