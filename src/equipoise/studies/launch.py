"""Run jobs in this process or in several processes of this machine."""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from typing import Any, Protocol, TypeVar

from equipoise.errors import UserError, one_line
from equipoise.files import disk_is_full
from equipoise.training import signals

Job = TypeVar("Job")
Result = TypeVar("Result")

POLL = 0.2  # seconds between checks for a signal
LONGEST_LINE = 300  # characters


@dataclass(frozen=True)
class Failure:
    """A job without a result.

    Attributes:
        line: The reason in one line.
        traceback: Where the error was raised; empty if the input was wrong.
    """

    line: str
    traceback: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", one_line(self.line, LONGEST_LINE))


class Launcher(Protocol):
    """Runs a list of jobs and yields each with its result or failure, in the order of completion.

    `work` is a function of a module and a job can be pickled, so that both can be sent to another process or machine.
    It is called with a job and the number of jobs that share its device, which makes their timings longer.
    """

    def __call__(
        self, work: Callable[[Job, int], Result], jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Result | Failure]]: ...


def here(work: Callable[[Job, int], Result], jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | Failure]]:
    """Run jobs one after the other in this process; code that was compiled for one job is reused by the next."""
    for job in jobs:
        signals.check()
        yield job, attempt(work, job)


def processes(count: int) -> Launcher:
    """Return a launcher that runs jobs in several processes.

    The visible GPUs are assigned to the processes in turn; the cores are divided evenly.

    Args:
        count: Number of processes.
    """
    if count < 1:
        raise UserError(f"{count} processes: at least 1")

    def launch(work: Callable[[Job, int], Result], jobs: Sequence[Job]) -> Iterator[tuple[Job, Result | Failure]]:
        waiting, gpus, announced = deque(jobs), visible_gpus(), False
        used = min(count, len(jobs))
        idle = [
            _Worker(gpus[i % len(gpus)] if len(gpus) > 1 else None, count, -(-used // max(1, len(gpus))))
            for i in range(used)
        ]
        workers = tuple(idle)
        running: dict[Future[Any], tuple[Job, _Worker]] = {}
        try:
            while waiting or running:
                while waiting and idle:
                    job, worker = waiting.popleft(), idle.pop()
                    running[worker.submit(work, job)] = job, worker
                done, _ = wait(running, POLL, FIRST_COMPLETED)
                for future in done:
                    job, worker = running.pop(future)
                    idle.append(worker)
                    yield job, worker.outcome(future)
                if signals.requested() and not announced:
                    announced = True
                    waiting.clear()
                    for process in active_children():
                        process.terminate()
            signals.check()
        finally:
            for worker in workers:
                worker.close()

    return launch


class _Worker:
    """A process that runs one job at a time; it is replaced if it dies, so that only its job fails."""

    def __init__(self, gpu: str | None, processes: int, on_device: int) -> None:
        self._start = gpu, processes
        self._on_device = on_device
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, work: Callable[[Job, int], Result], job: Job) -> Future[Result | Failure]:
        try:
            if self._executor is not None:
                return self._executor.submit(attempt, work, job, self._on_device)
        except BrokenProcessPool:  # the process was killed between two jobs
            self.close()
        self._executor = ProcessPoolExecutor(1, get_context("spawn"), _start, self._start)
        return self._executor.submit(attempt, work, job, self._on_device)

    def outcome(self, future: Future[Result | Failure]) -> Result | Failure:
        try:
            return future.result()
        except signals.Stopped:
            return Failure("stopped; run the study again to continue it")
        except BrokenProcessPool:
            self.close()
            return Failure("its process was killed; run the study again to continue it")
        except Exception as error:  # a job or a result that cannot be pickled
            return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


def _start(gpu: str | None, processes: int) -> None:
    """Prepare a new process, before it touches a GPU."""
    signals.stop_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


def _end_with_parent() -> None:
    """End this process when its parent is killed, instead of finishing the job."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def attempt(work: Callable[[Job, int], Result], job: Job, on_device: int = 1) -> Result | Failure:
    """Run a job and turn an error into a `Failure`.

    The exception itself is dropped, because its frames keep everything alive that they refer to, such as the model.
    """
    try:
        return work(job, on_device)
    except UserError as error:
        return Failure(str(error))
    except Exception as error:
        where = "" if disk_is_full(error) else traceback.format_exc()  # a full disk cannot keep it either
        return Failure(f"{type(error).__name__}: {error}", where)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]
