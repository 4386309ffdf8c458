"""Estimate how long the missing jobs of a study take.

The seconds of an epoch come, in this order, from the job's own epochs if it was interrupted, from another seed of its
arm, from another arm with the same model and data, or from a few steps that are taken for this purpose. Seconds of
another device are not used. Between arms, seconds are proportional to the passes over images.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equipoise.config import split
from equipoise.errors import UserError
from equipoise.studies.reading import read_json
from equipoise.studies.runner import Job, state
from equipoise.training.build_recipe import make_recipe
from equipoise.training.parts import find_device, relative_cost
from equipoise.training.recipe import Recipe
from equipoise.training.run_folder import RunFolder
from equipoise.training.trainer import Trainer

STEPS = 3  # of which the last is measured: the first ones are slower


def estimate(jobs: Sequence[Job]) -> dict[str, float | str]:
    """Return the seconds of training that are left of each unfinished job, by its name, or why they are unknown."""
    finished = [job for job in jobs if state(job) == "finished"]
    rates: dict[str, float] = {}  # seconds per pass over an image, by model and data
    known: dict[str, float] = {}  # seconds per epoch, by arm
    for job in finished:
        epoch = _last_epoch(job)
        if epoch is not None:
            known[job.arm] = epoch
            rates.setdefault(_workload(job), epoch / _passes(make_recipe(job.recipe)))
    left: dict[str, float | str] = {}
    for job in jobs:
        if job not in finished and not state(job).startswith("diverged"):
            try:
                left[str(job)] = _left(job, known, rates)
            except UserError as error:  # such as missing data
                left[str(job)] = str(error)
    return left


def _left(job: Job, known: Mapping[str, float], rates: dict[str, float]) -> float:
    recipe = make_recipe(job.recipe)
    metrics = RunFolder(job.folder).metrics()
    if metrics and isinstance(metrics[-1].get("seconds"), int | float):
        return metrics[-1]["seconds"] / len(metrics) * (recipe.epochs - len(metrics))
    if job.arm in known:
        return known[job.arm] * recipe.epochs
    workload = _workload(job)
    if workload not in rates:
        rates[workload] = _measure(job)
    return rates[workload] * _passes(recipe) * recipe.epochs


def _last_epoch(job: Job) -> float | None:
    """Return the mean seconds of an epoch of a finished job; `None` if they are unknown or of another device."""
    found = read_json(job.result)
    try:
        last, device = found["epochs"][-1], found["environment"]["device"]
        return last["seconds"] / last["epoch"] if device == _device_name(make_recipe(job.recipe).device) else None
    except (UserError, LookupError, TypeError, ZeroDivisionError):
        return None


def _device_name(name: str) -> str:
    device = find_device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _workload(job: Job) -> str:
    """Return what the seconds of a pass depend on most: the model and the data."""
    data, options = split(job.recipe.get("data", "digits"), "data")
    return repr((job.recipe.get("model"), data, options.get("size"), job.recipe.get("storage")))


def _passes(recipe: Recipe) -> float:
    """Return the cost of an image in forward passes: a step, its attack and its correction."""
    own = 3 * recipe.objective.loss_passes + 2 * recipe.objective.attack_passes
    return own * relative_cost(recipe, recipe.correction)


def _measure(job: Job) -> float:
    """Return the seconds of an epoch per pass, from a few steps without correction."""
    raw: dict[str, Any] = {**job.recipe, "correction": "sgd", "engine": "eager"}
    trainer = Trainer(make_recipe(raw))
    for _ in range(min(STEPS, len(trainer.parts.train))):
        begin = time.perf_counter()
        trainer.take_step()
        if trainer.parts.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    return seconds * len(trainer.parts.train) / _passes(trainer.recipe)
