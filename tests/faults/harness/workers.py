"""Processes that do the work of a campaign, so that a crash is a failure and not the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.tally import Tally

SPAWN = multiprocessing.get_context("spawn")
LIMIT = 1800  # seconds that one unit of work may take

Do = Callable[[Any, Path, Tally, Callable[[str], None]], None]
"""Does one unit: the unit, a new folder, the tally to extend, and a function to tell what is tried next."""


class Worker:
    """A process in a session of its own, which is killed with everything that it has started.

    Args:
        do: Does one unit of work. It is imported in the process, so it is a function of a module.
        folder: The folder of the process.
    """

    def __init__(self, do: Do, folder: Path) -> None:
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(do, folder, theirs))
        self.process.start()
        theirs.close()
        self.unit: Any = None
        self.at, self.since = "", 0.0

    def give(self, unit: Any) -> None:
        self.unit, self.at, self.since = unit, str(unit), time.monotonic()
        self.connection.send(unit)

    def receive(self) -> Tally | None:
        """Return the tally of the unit once it is done. A death of the process is a failure."""
        try:
            found = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            found = Tally(failures=[f"{self.at}: the process died with status {self.process.exitcode}"])
        if isinstance(found, str):
            self.at = found
            return None
        self.unit = None
        return found

    @property
    def late(self) -> bool:
        return self.unit is not None and time.monotonic() - self.since > LIMIT

    def kill(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no session yet
                self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(do: Do, folder: Path, connection: Connection) -> None:
    os.setsid()  # Ctrl-C is for the campaign, which kills this session
    os.environ["GIT_COMMIT"] = "harness"  # studies would ask git for each result
    for number, unit in enumerate(iter(connection.recv, None)):
        tally = Tally()
        do(unit, folder / str(number), tally, connection.send)
        connection.send(tally)


def work(do: Do, next_unit: Callable[[], Any], jobs: int, folder: Path) -> Iterator[Tally]:
    """Do units in several processes at the same time; yield the tally of each. A process that dies is replaced.

    Args:
        do: Does one unit.
        next_unit: Called for a unit whenever a process is idle; `None` if there is none.
        jobs: Number of processes.
        folder: A folder for all processes.
    """
    made = 0
    workers: list[Worker] = []
    try:
        while True:
            while len(workers) < jobs and (unit := next_unit()) is not None:
                workers.append(Worker(do, folder / str(made)))
                workers[-1].give(unit)
                made += 1
            if not workers:
                return
            ready = wait([worker.connection for worker in workers], timeout=60)
            for worker in [each for each in workers if each.connection in ready or each.late]:
                found = Tally(failures=[f"{worker.at}: no end"]) if worker.late else worker.receive()
                if found is None:
                    continue
                yield found
                unit = next_unit() if worker.unit is None and worker.process.is_alive() else None
                if unit is None:
                    worker.kill()
                    workers.remove(worker)
                else:
                    worker.give(unit)
    finally:
        for worker in workers:
            worker.kill()
