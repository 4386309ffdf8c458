"""Runs what is missing of a study, and goes on with what was interrupted."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.display.tables import percent
from equipoise.errors import NonFiniteLoss, UserError, one_line
from equipoise.seeds import derive
from equipoise.studies.design import Design, same_recipe
from equipoise.studies.launch import Failure, Launcher, here, together
from equipoise.studies.record import record
from equipoise.studies.results import result_file, slug, write_result
from equipoise.studies.robust import first, make_judge
from equipoise.training import signals
from equipoise.training.evaluate import three_ways
from equipoise.training.measure import MeasureWatcher, measure_trainer
from equipoise.training.recipe import lay_over, make_recipe
from equipoise.training.run_folder import RunFolder, read_epochs
from equipoise.training.trainer import Trainer, resume

ALONG_FILE = "measure.jsonl"


@dataclass(frozen=True)
class Job:
    """One arm with one seed: what to run, where it works, where its result goes.

    beside: runs on its device that were begun by others.
    """

    study: str
    arm: str
    seed: int
    recipe: Mapping[str, Any]
    folder: Path
    result: Path
    robust: str | None = None
    attacked: int = 0
    measure: bool = False
    measure_every: int = 0
    beside: int = 0

    @property
    def judged(self) -> dict[str, Any]:
        """What is asked about the run beside its recipe."""
        attacked = self.attacked if self.robust else 0
        return {"robust": self.robust, "attacked": attacked, "measure": self.measure, "along": self.measure_every}

    def __str__(self) -> str:
        return f"{self.study}, {self.arm}, seed {self.seed}"


def jobs_of(
    design: Design,
    results: Path,
    work: Path,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    data: Path | None = None,
    beside: int = 0,
) -> list[Job]:
    """All jobs of a study, or those of some arms and seeds, seed by seed. data: where the datasets are."""
    unknown = [seed for seed in seeds if seed not in design.seeds]
    if unknown:
        raise UserError(f"{design.name} has no seed {unknown[0]}; there is {', '.join(map(str, design.seeds))}")
    name = slug(design.name)
    jobs = []
    for seed in seeds or design.seeds:
        for arm in only or design.every_arm:
            raw = design.raw(arm, seed)
            if data is not None:
                raw = lay_over(raw, {"data": {"root": str(data)}})
            path = result_file(results / name, arm, seed)
            folder = work / name / path.stem
            judged = (design.robust, design.attacked, design.measure, design.measure_every, beside)
            jobs.append(Job(design.name, arm, seed, raw, folder, path, *judged))
    return jobs


def run_study(
    design: Design, jobs: Sequence[Job], results: Path, launcher: Launcher = here, say: Callable[[str], None] = print
) -> bool:
    """Run the jobs that have no result yet; whether all have one now. One line is said of each."""
    write_result(results / slug(design.name) / "study.json", design.asked())
    sound, missing = True, []
    for job in jobs:
        try:
            if not is_finished(job):
                missing.append(job)
        except UserError as error:
            say(f"{job}: {error}")
            sound = False
    if len(missing) < len(jobs):
        say(f"{design.name}: {len(missing)} of {len(jobs)} to run")
    for job, outcome in launcher(run_job, missing):
        if isinstance(outcome, Failure):
            say(f"{job}: {outcome.line}{_kept(job, outcome)}")
            sound = False
        else:
            say(f"{job}: {outcome}")
    return sound


def run_job(job: Job) -> str:
    """Train to the end, from wherever it stands, and write the result. A line about it."""
    with _trainer(job) as trainer:
        if is_finished(job):  # by another process, between the look and the claim
            return "finished by another process"
        if job.measure and job.measure_every:
            trainer.watcher = MeasureWatcher(job.folder / ALONG_FILE, job.measure_every)
        try:
            result = trainer.run()
        except NonFiniteLoss as error:
            return _diverged(job, trainer, error)
        assert trainer.folder is not None
        trainer.folder.claim()  # the rest belongs to the job, too
        value = record(job.study, job.arm, trainer, result, together() + job.beside) | {"judged": job.judged}
        if job.robust is not None:
            value["robust"] = robust_scores(trainer, job.robust, job.attacked)
        if job.measure:
            value["measured"] = measurements(trainer, job.folder / ALONG_FILE)
        write_result(job.result, value)
        scores = ", ".join(f"{score} {percent(s['accuracy'])}" for score, s in result["test"].items())
        return f"{scores}, {trainer.seconds:.1f} s" + (", learned nothing" if trainer.learned_nothing else "")


def _diverged(job: Job, trainer: Trainer, error: NonFiniteLoss) -> str:
    """A run that diverges would do so again: that is its result, and not to be left out of a comparison."""
    why = one_line(str(error).partition(";")[0], 200)  # without the advice
    write_result(job.result, {**record(job.study, job.arm, trainer, {}, together() + job.beside), "diverged": why})
    return f"diverged: {why}"


def is_finished(job: Job) -> bool:
    """Whether there is a result of this job; one of another recipe is an error, and is never written over."""
    return _found(job) is not None


def _found(job: Job) -> Mapping[str, Any] | None:
    if not job.result.exists():
        return None
    try:
        found = json.loads(job.result.read_text(encoding="utf-8"))
        same = found["arm"] == job.arm and found["finished"] is True and same_recipe(job.recipe, found["recipe"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{job.result} is damaged; remove it to run the arm again") from None
    if not same:
        raise UserError(f"{job.result} is of another recipe; rename the arm, or remove it to run the arm again")
    if not found.get("diverged") and found.get("judged", job.judged) != job.judged:
        raise UserError(f"{job.result} was attacked or measured otherwise; remove it to judge the arm again")
    return dict(found)


def state(job: Job) -> str:
    """How far a job is, in words."""
    try:
        if found := _found(job):
            return f"diverged: {found['diverged']}" if found.get("diverged") else "finished"
    except UserError as error:
        return str(error)
    epochs = len(RunFolder(job.folder).metrics())
    return f"interrupted after {epochs} epochs" if (job.folder / "recipe.yaml").is_file() else "missing"


@contextmanager
def _trainer(job: Job) -> Iterator[Trainer]:
    """A trainer that stands where the job was interrupted, or at its start; all it holds is freed afterwards."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()  # those of the job before
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
        raise UserError(f"{job.folder} is a run of another recipe; remove it to run the arm again")
    data = job.recipe.get("data", {})
    root = {"root": data["root"]} if isinstance(data, Mapping) and "root" in data else {}
    recipe = make_recipe(lay_over(raw, {"data": root}))  # the data may lie elsewhere by now
    folder.store.keep = recipe.checkpoint.keep
    return resume(folder, recipe)


def _free(trainer: Trainer) -> None:
    """Give memory back before the next job: graphs, compiled code that is bound to this model, cached blocks.

    Compiled kernels stay in the compiler's cache on disk, and measured convolutions in this process.
    """
    if trainer.parts.engine.captures:
        torch.compiler.reset()  # else the next models would count as recompilations, of which there may be few
    vars(trainer).clear()  # whoever still holds the trainer holds nothing
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def robust_scores(trainer: Trainer, attack: str, images: int) -> dict[str, dict[str, Any]]:
    """Clean and robust accuracy on the first test images (0 is all), three ways, from the same random starts."""
    parts = trainer.parts
    judge = make_judge(attack, seed=derive(trainer.recipe.seed, "evaluation"))
    loader = parts.loaders["test"]
    count = min(images or loader.order.count, loader.order.count)
    scores = {}
    with closing(three_ways(parts.model, trainer.recalibration_images, parts.ema)) as ways:
        for score in ways:
            found = judge.run(parts.model, first(count, loader.epoch(0), count), lambda _: signals.check())
            scores[score] = {"clean": found.clean, "robust": found.robust, "images": found.images}
    return scores


def measurements(trainer: Trainer, along: Path) -> dict[str, Any]:
    """Gradient variance, correlation and coefficients at the final weights, and epoch by epoch where there are."""
    every = len(trainer.parts.train)  # all batches, as the paper: a mean has no noise then
    found = measure_trainer(trainer, every, on_batch=signals.check)
    if along.is_file():
        found["along"] = [
            {key: value for key, value in line.items() if key != "c_star_by_layer"} for line in read_epochs(along)
        ]
    return found


def _kept(job: Job, failure: Failure) -> str:
    """Where a failure that is not about wrong input came from is kept beside the job's folder."""
    if not failure.traceback:
        return ""
    file = job.folder.with_name(f"{job.folder.name}.error.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(failure.traceback, encoding="utf-8")
    return f" ({file})"
