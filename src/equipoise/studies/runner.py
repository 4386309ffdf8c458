"""Run the missing jobs of a study, and continue the interrupted ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from equipoise.display.tables import percent
from equipoise.errors import NonFiniteLoss, UserError, one_line
from equipoise.studies.design import Design
from equipoise.studies.launch import Failure, Launcher, here
from equipoise.studies.reading import read_json
from equipoise.studies.recipe_match import same_recipe
from equipoise.studies.record import record
from equipoise.studies.results import result_file, slug, write_result
from equipoise.studies.robust import robust_scores
from equipoise.training import signals
from equipoise.training.build_recipe import import_code, make_recipe
from equipoise.training.measure import MeasureWatcher, measure_trainer
from equipoise.training.recipe_files import lay_over
from equipoise.training.run_folder import RunFolder, read_epochs
from equipoise.training.trainer import Trainer, resume
from equipoise.training.watchers import ProgressLines, Watcher, Watchers

ALONG_FILE = "measure.jsonl"


@dataclass(frozen=True)
class Job:
    """One arm of a study with one seed.

    Attributes:
        recipe: The recipe, as plain values.
        folder: The folder of the run.
        result: The file of the result.
        other_jobs: Number of other jobs sharing the device; recorded next to the timings.
        allow_code: Whether to import the Python code that the recipe names.
    """

    design: Design
    arm: str
    seed: int
    recipe: Mapping[str, Any]
    folder: Path
    result: Path
    other_jobs: int = 0
    allow_code: bool = False

    def __str__(self) -> str:
        return f"{self.design.name}, {self.arm}, seed {self.seed}"


def jobs_of(
    design: Design,
    results: Path,
    work: Path,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    data: Path | None = None,
    other_jobs: int = 0,
    allow_code: bool = False,
) -> list[Job]:
    """Return the jobs of a study, seed by seed.

    Args:
        design: The study.
        results: The folder of all results.
        work: The folder of all runs.
        only: Arms to run; empty for all.
        seeds: Seeds to run; empty for all.
        data: The folder of the datasets; `None` for the folder in the recipes.
        other_jobs: Number of other jobs sharing the device.
        allow_code: Whether to import the Python code that the recipes name.

    Raises:
        UserError: If the study has no such arm or seed.
    """
    unknown = [seed for seed in seeds if seed not in design.seeds]
    if unknown:
        raise UserError(f"{design.name} has no seed {unknown[0]}; choose from {', '.join(map(str, design.seeds))}")
    name = slug(design.name)
    jobs = []
    for seed in seeds or design.seeds:
        for arm in only or design.every_arm:
            raw = design.raw(arm, seed)
            if data is not None:
                raw = lay_over(raw, {"data": {"root": str(data)}})
            path = result_file(results / name, arm, seed)
            jobs.append(Job(design, arm, seed, raw, work / name / path.stem, path, other_jobs, allow_code))
    return jobs


def run_study(
    design: Design, jobs: Sequence[Job], results: Path, launcher: Launcher = here, say: Callable[[str], None] = print
) -> bool:
    """Run the jobs that have no result yet.

    Args:
        design: The study. It is written to study.json.
        jobs: The jobs, see `jobs_of`.
        results: The folder of all results.
        launcher: Where the jobs run.
        say: Called with one line about each job.

    Returns:
        Whether every job has a result now.
    """
    write_result(results / slug(design.name) / "study.json", design.to_json())
    complete, missing = True, []
    for job in jobs:
        try:
            if _found(job) is None:
                missing.append(job)
        except UserError as error:
            say(f"{job}: {error}")
            complete = False
    if len(missing) < len(jobs):
        say(f"{design.name}: {len(missing)} of {len(jobs)} to run")
    for job, outcome in launcher(run_job, missing):
        if isinstance(outcome, Failure):
            complete = False
            outcome = f"{outcome.line}{_kept(job, outcome)}"
        say(f"{job}: {outcome}")
    return complete


def run_job(job: Job, on_device: int = 1) -> str:
    """Train to the end, from the last checkpoint if there is one, and write the result. Return a line about it.

    Args:
        job: The job.
        on_device: Number of jobs of this study that share the device.
    """
    design = job.design
    if job.allow_code:
        import_code(job.recipe)  # this may be another process than the one that read the study
    with _trainer(job) as trainer:
        if _found(job) is not None:  # another process finished it before this one claimed the folder
            return "finished by another process"
        watchers: list[Watcher] = [ProgressLines(partial(print, flush=True), f"{job}:")]
        if design.measure and design.measure_every:
            watchers.append(MeasureWatcher(job.folder / ALONG_FILE, design.measure_every))
        trainer.watcher = Watchers(*watchers)
        sharing = on_device + job.other_jobs
        try:
            result = trainer.run()
        except NonFiniteLoss as error:
            # a run that diverges would do so again: that is its result
            why = one_line(str(error).partition(";")[0], 200)  # without the advice
            write_result(job.result, {**record(design.name, job.arm, trainer, {}, sharing), "diverged": why})
            return f"diverged: {why}"
        assert trainer.folder is not None
        trainer.folder.claim()  # until the result is written
        value = record(design.name, job.arm, trainer, result, sharing) | {"judged": design.judged}
        if design.robust is not None:
            value["robust"] = robust_scores(trainer, design.robust, design.attacked)
        if design.measure:
            value["measured"] = _measurements(trainer, job.folder / ALONG_FILE)
        write_result(job.result, value)
        scores = ", ".join(f"{score} {percent(s['accuracy'])}" for score, s in result["test"].items())
        return f"{scores}, {trainer.seconds:.1f} s" + (", learned nothing" if trainer.learned_nothing else "")


def _found(job: Job) -> Mapping[str, Any] | None:
    """Return the result of a job if there is one. A result of another recipe is an error; it is never overwritten."""
    if not job.result.exists():
        return None
    try:
        found = read_json(job.result)
        same = found["arm"] == job.arm and found["finished"] is True and same_recipe(job.recipe, found["recipe"])
    except UserError as error:
        raise UserError(f"{job.result}: {error}") from None
    except (OSError, LookupError, TypeError, AttributeError):
        raise UserError(f"{job.result}: it is damaged; remove it and run the study again") from None
    if not same:
        raise UserError(f"{job.result} is of another recipe; rename the arm, or remove the file to run the arm again")
    if not found.get("diverged") and found.get("judged", job.design.judged) != job.design.judged:
        raise UserError(f"{job.result} was attacked or measured differently; remove it and run the study again")
    return found


def state(job: Job) -> str:
    """Describe the progress of a job."""
    try:
        if found := _found(job):
            return f"diverged: {found['diverged']}" if found.get("diverged") else "finished"
    except UserError as error:
        return str(error)
    epochs = len(RunFolder(job.folder).metrics())
    return f"interrupted after {epochs} epochs" if (job.folder / "recipe.yaml").is_file() else "missing"


@contextmanager
def _trainer(job: Job) -> Iterator[Trainer]:
    """Yield a trainer at the job's last checkpoint or at its start, and free its memory afterwards."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()  # those of the previous job
    trainer = _resumed(job) if (job.folder / "recipe.yaml").is_file() else _fresh(job)
    assert trainer.folder is not None
    try:
        yield trainer
    finally:
        trainer.folder.release()
        _free(trainer)


def _fresh(job: Job) -> Trainer:
    recipe = make_recipe(job.recipe)
    trainer = Trainer(recipe)
    trainer.parts.correction.estimate_cost(len(trainer.parts.train)).check(trainer.parts.device)
    trainer.folder = RunFolder.create(job.folder, trainer.raw, recipe.checkpoint.keep)
    trainer.folder.claim()
    return trainer


def _resumed(job: Job) -> Trainer:
    folder = RunFolder.open(job.folder)
    raw = folder.recipe()
    if not same_recipe(job.recipe, raw):
        raise UserError(f"{job.folder} is a run of another recipe; remove the folder to run the arm again")
    data = job.recipe.get("data", {})
    root = {"root": data["root"]} if isinstance(data, Mapping) and "root" in data else {}
    recipe = make_recipe(lay_over(raw, {"data": root}))  # the data may have moved
    folder.store.keep = recipe.checkpoint.keep
    return resume(folder, recipe)


def _free(trainer: Trainer) -> None:
    """Free graphs, compiled code that is bound to this model, and cached blocks.

    Compiled kernels stay in the compiler's cache on disk, and measured convolutions in this process.
    """
    if trainer.parts.engine.captures:
        torch.compiler.reset()  # else the next models count as recompilations, whose number is limited
    trainer.close()  # something may still refer to it, such as the traceback of an error
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _measurements(trainer: Trainer, along: Path) -> dict[str, Any]:
    """Measure gradients at the final weights, and add what was measured during training."""
    every = len(trainer.parts.train)  # all batches, as in the paper: the mean gradient has no noise then
    found = measure_trainer(trainer, every, on_batch=signals.check)
    if along.is_file():
        found["along"] = [
            {key: value for key, value in line.items() if key != "c_star_by_layer"} for line in read_epochs(along)
        ]
    return found


def _kept(job: Job, failure: Failure) -> str:
    """Write the traceback of a failure next to the job's folder, and return the path in parentheses."""
    if not failure.traceback:
        return ""
    file = job.folder.with_name(f"{job.folder.name}.error.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(failure.traceback, encoding="utf-8")
    return f" ({file})"
