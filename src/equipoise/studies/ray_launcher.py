"""Jobs as tasks of a Ray cluster (extra `ray`)."""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.errors import UserError
from equipoise.studies.launch import POLL, Failure, Job, Launcher, Result, attempt
from equipoise.training import signals

PATIENCE = 5  # seconds for a cluster to answer
Resources = Mapping[str, float]  # num_cpus, num_gpus, as Ray calls them


def on_ray(address: str | None, resources: Callable[[Any, bool], Resources]) -> Launcher:
    """One task for each job, with the resources that it asks for; Ray says where and when.

    address: of the cluster, or None for one on this machine that lasts as long as the study. resources: what a job
    needs, given the job and whether the cluster has GPUs. Folders are those of this machine, by their path: all
    machines of the cluster must see them.
    """
    ray = _ray()

    def launch(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | Failure]]:
        _connect(ray, address)
        try:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            task, folder = ray.remote(_in_folder), Path.cwd()
            pending = {
                task.options(max_retries=0, **resources(job, has_gpus)).remote(folder, work, job): job for job in jobs
            }
            while pending:
                done, _ = ray.wait(list(pending), timeout=POLL)
                for reference in done:
                    yield pending.pop(reference), _outcome(ray, reference)
                signals.check()  # what is still running ends with the connection
        finally:
            ray.shutdown()

    return launch


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("Ray is not installed; pip install 'equipoise[ray]'") from None


def _connect(ray: Any, address: str | None) -> None:
    try:
        if machine := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d{1,5})", address or ""):
            # Ray itself would try for minutes
            socket.create_connection((machine[1], int(machine[2])), PATIENCE).close()
        # not by default: a cluster that happens to be in the environment is not asked for
        ray.init(address=address or "local", log_to_driver=False, configure_logging=False)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at {address}: {error}") from None


def _in_folder(folder: Path, work: Callable[[Job], Result], job: Job) -> Result | Failure:
    """In a process of the cluster: relative paths mean what they mean here."""
    os.chdir(folder)
    return attempt(work, job)


def _outcome(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:  # its process or its machine has gone
        return Failure(f"{type(error).__name__}: {error}; run the study again to go on with it")
