"""Where jobs run: here, one after the other, or in processes of this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from typing import Protocol, TypeVar

from equipoise.errors import UserError, one_line
from equipoise.files import disk_is_full
from equipoise.training import signals

Job = TypeVar("Job")
Result = TypeVar("Result")

POLL = 0.2  # seconds between looks whether a signal has asked to stop
_together = 1


def together() -> int:
    """How many jobs share the device of this process: their seconds are not those of a run alone."""
    return _together


LONGEST_LINE = 300  # characters


@dataclass(frozen=True)
class Failure:
    """A job that came to no result: why, in one line, and where, unless the reason is wrong input."""

    line: str
    traceback: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", one_line(self.line, LONGEST_LINE))


class Launcher(Protocol):
    """Maps a list of jobs: each with its result or its failure, in the order in which they are done.

    `work` is a function of a module and a job can be pickled, so that both can go to another process or machine.
    """

    def __call__(
        self, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Result | Failure]]: ...


def here(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | Failure]]:
    """In this process, one after the other: what is compiled or tuned for one job serves the next."""
    for job in jobs:
        signals.check()
        yield job, attempt(work, job)


def processes(count: int) -> Launcher:
    """In so many processes, each of which takes the next job when it is done with one.

    Where there are several GPUs, the processes are given them in turn; the cores are shared out evenly.
    """
    if count < 1:
        raise UserError(f"{count} processes: at least one")

    def launch(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | Failure]]:
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Job, Result | Failure] | None] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        gpus, working, told = visible_gpus(), min(count, len(jobs)), threading.Event()
        for slot in range(working):
            gpu = gpus[slot % len(gpus)] if len(gpus) > 1 else None
            sharers = (count, -(-min(count, len(jobs)) // max(1, len(gpus))))
            threading.Thread(target=_serve, args=(work, waiting, done, gpu, *sharers), daemon=True).start()
        try:
            while working:
                outcome = _next(done, waiting, told)
                if outcome is None:
                    working -= 1
                else:
                    yield outcome
            signals.check()
        finally:
            _drain(waiting)  # where this is broken off, no further job is begun

    return launch


def _next(
    done: queue.SimpleQueue[tuple[Job, Result | Failure] | None],
    waiting: queue.SimpleQueue[Job],
    told: threading.Event,
) -> tuple[Job, Result | Failure] | None:
    """What is done next; None where a process has no more to do.

    A signal that asks to stop is passed on to the processes, once, and no further job is begun.
    """
    while True:
        try:
            return done.get(timeout=POLL)
        except queue.Empty:
            if signals.requested() and not told.is_set():
                told.set()
                _drain(waiting)
                for process in active_children():
                    process.terminate()


def _drain(waiting: queue.SimpleQueue[Job]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()


def attempt(work: Callable[[Job], Result], job: Job) -> Result | Failure:
    """Do it. An error becomes words at once: while it lives, so does all that its frames hold, a model say."""
    try:
        return work(job)
    except UserError as error:
        return Failure(str(error))
    except Exception as error:
        where = "" if disk_is_full(error) else traceback.format_exc()  # which could not be kept, either
        return Failure(f"{type(error).__name__}: {error}", where)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]


def _serve(
    work: Callable[[Job], Result],
    waiting: queue.SimpleQueue[Job],
    done: queue.SimpleQueue[tuple[Job, Result | Failure] | None],
    gpu: str | None,
    sharers: int,
    on_its_device: int,
) -> None:
    """Hand one job after the other to a process of its own; one that dies takes only its job with it."""
    executor: ProcessPoolExecutor | None = None
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            break
        if executor is None:
            executor = ProcessPoolExecutor(1, get_context("spawn"), _begin, (gpu, sharers, on_its_device))
        try:
            done.put((job, executor.submit(attempt, work, job).result()))
        except signals.Stopped:
            done.put((job, Failure("stopped; run the study again to go on with it")))
        except BrokenProcessPool:
            done.put((job, Failure("its process was killed; run the study again to go on with it")))
            executor = None
        except Exception as error:  # nothing may leave the reader of `done` waiting
            done.put((job, Failure(f"{type(error).__name__}: {error}", traceback.format_exc())))
    if executor is not None:
        executor.shutdown()
    done.put(None)


def _begin(gpu: str | None, sharers: int, on_its_device: int) -> None:
    """In a new process, before it touches a GPU."""
    global _together
    _together = on_its_device
    signals.stop_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // sharers))


def _end_with_parent() -> None:
    """A study that is killed leaves no process behind that would go on with its job."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
