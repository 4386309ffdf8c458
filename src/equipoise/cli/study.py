"""What `equipoise study` does with its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from equipoise.errors import UserError
from equipoise.studies.design import packaged_studies, read_design, read_study
from equipoise.studies.launch import Launcher, here, processes
from equipoise.studies.runner import Job, jobs_of, run_study, state
from equipoise.training.recipe import make_recipe

FOLDERS = ("folder", "imagenet")  # datasets that are read by processes of their own


def study_command(
    file: str | None,
    results: Path,
    work: Path,
    data: Path | None,
    jobs: int,
    only: Sequence[str],
    seeds: str,
    list_only: bool,
    reproduction: Path | None,
    console: Console,
    launcher: str = "local",
    address: str | None = None,
    other_jobs: int = 0,
) -> bool:
    """Run, list, or write the page; whether all went well."""
    if launcher not in ("local", "ray"):
        raise UserError(f"--launcher {launcher}: it is local or ray")
    if address is not None and launcher != "ray":
        raise UserError("--address is that of a Ray cluster; it goes with --launcher ray")
    if reproduction is not None:
        from equipoise.report.reproduction import write_page

        for problem in write_page(results, reproduction):
            console.print(problem, markup=False, highlight=False, soft_wrap=True)
        console.print(f"written: {reproduction}")
        return True
    if file is None:
        for name in packaged_studies():
            console.print(f"{name:<28}{read_design(name).title}")
        return True
    design = read_study(file)
    chosen = jobs_of(design, results, work, list(dict.fromkeys(only)), parse_seeds(seeds), data, other_jobs)
    if list_only:
        for job in chosen:
            console.print(f"{job}: {state(job)}")
        return True
    return run_study(design, chosen, results, _launcher(launcher, jobs, address), console.print)


def _launcher(name: str, jobs: int, address: str | None) -> Launcher:
    if name == "ray":
        from equipoise.studies.ray_launcher import on_ray

        return on_ray(address, resources)
    return here if jobs == 1 else processes(jobs)


def resources(job: Job, has_gpus: bool) -> dict[str, float]:
    """What a job asks a cluster for: a core, one more for each process that reads images, a GPU if it can use one."""
    recipe = make_recipe(job.recipe)
    readers = recipe.data.workers if recipe.data.name in FOLDERS else 0
    wants_gpu = recipe.device.startswith("cuda") or (recipe.device == "auto" and has_gpus)
    return {"num_cpus": 1 + readers, "num_gpus": float(wants_gpu)}


def parse_seeds(text: str) -> list[int]:
    """`0,1` as numbers; nothing is all of them."""
    words = [word.strip() for word in text.split(",")] if text else []
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 19)]
    if wrong:
        raise UserError(f'--seeds {text}: "{wrong[0]}" is not a seed; write them as 0,1')
    return list(dict.fromkeys(map(int, words)))
