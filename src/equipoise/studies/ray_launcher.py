"""Run jobs as tasks of a Ray cluster (extra `ray`)."""

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
Resources = Mapping[str, float]  # num_cpus and num_gpus, Ray's names


def on_ray(address: str | None, resources: Callable[[Any, bool], Resources]) -> Launcher:
    """Return a launcher that runs each job as a Ray task.

    Paths refer to this machine; every machine of the cluster must see the same folders.

    Args:
        address: Address of the cluster; `None` starts a local one that ends with the study.
        resources: Called with a job and whether the cluster has GPUs. Returns what the job needs.
    """
    ray = _ray()

    def launch(work: Callable[[Job, int], Result], jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | Failure]]:
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
                signals.check()  # running tasks end with the connection
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
            # Ray would retry for minutes
            socket.create_connection((machine[1], int(machine[2])), PATIENCE).close()
        # "local" keeps Ray from joining a cluster that the environment names
        ray.init(address=address or "local", log_to_driver=False, configure_logging=False)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at {address}: {error}") from None


def _in_folder(folder: Path, work: Callable[[Job, int], Result], job: Job) -> Result | Failure:
    """Run a job in a process of the cluster, with relative paths as on this machine."""
    os.chdir(folder)
    return attempt(work, job)


def _outcome(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:  # the process or the machine is gone
        return Failure(f"{type(error).__name__}: {error}; run the study again to continue it")
