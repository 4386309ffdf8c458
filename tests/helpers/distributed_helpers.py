"""Processes for tests of distributed training, and the comparison of their runs."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing import get_context

from double_helpers import float64_by_default
from equipoise.models import MODELS
from equipoise.training import RunFolder, Trainer, make_recipe, resume
from equipoise.training.processes import joined
from equipoise.world import ALONE, World
from train_helpers import tiny

PATIENCE = 180  # seconds that any one task may take; the first one also waits for the processes to start

Task = Callable[..., Any]


class Processes:
    """Processes joined over gloo. Each runs tasks with its `World` and returns the results.

    Args:
        count: Number of processes.
        preload: Modules that take long to import; they are imported once for all processes.
    """

    def __init__(self, count: int, preload: Sequence[str] = ()) -> None:
        context, port = get_context("forkserver" if preload else "spawn"), free_port()
        if preload:
            context.set_forkserver_preload([*preload])
        ends = [context.Pipe() for _ in range(count)]
        self._connections = [mine for mine, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, task: Task, *arguments: Any) -> list[Any]:
        """Run a task in all processes and return the results by rank; an error in one of them is raised."""
        for connection in self._connections:
            connection.send((task, arguments))
        answers = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(PATIENCE), f"process {rank} does not answer"
            answers.append(connection.recv())
        failed = [text for text, _ in answers if text]
        assert not failed, "\n".join(failed)
        return [found for _, found in answers]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@functools.cache
def processes(count: int) -> Processes:
    """Processes that are started once per session, because starting takes longer than most tests."""
    found = Processes(count)
    atexit.register(found.end)
    return found


def _serve(rank: int, count: int, port: int, connection: Connection) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update(
        {name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    with joined("cpu") as world:
        while True:
            task, arguments = connection.recv()
            try:
                connection.send(("", plain(task(world, *arguments))))
            except BaseException:
                connection.send((traceback.format_exc(), None))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain(value: Any) -> Any:
    """Convert tensors to arrays, which are sent between processes without shared memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


# Runs


def double_trainer(world: World, changes: dict[str, Any]) -> Trainer:
    """A trainer of `tiny` in float64; its images stay in float32 up to the model."""
    with float64_by_default():
        trainer = Trainer(make_recipe(tiny(**changes)), world=world)
    trainer.parts.model.register_forward_pre_hook(lambda _, arguments: (arguments[0].double(),))
    return trainer


def train(world: World, changes: dict[str, Any], double: bool = True) -> dict[str, Any]:
    """Train `tiny` and return its final state."""
    trainer = double_trainer(world, changes) if double else Trainer(make_recipe(tiny(**changes)), world=world)
    result = trainer.run()
    return found(trainer) | {"test": result["test"]}


def normed(classes: int = 10, channels: int = 1) -> nn.Module:
    """Two convolutions with BatchNorm, and a linear layer."""
    first = (nn.Conv2d(channels, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(8 * 4 * 4, classes))


def train_normed(world: World, changes: dict[str, Any]) -> dict[str, Any]:
    """Train a model that is not in the catalogue."""
    with mock.patch.dict(MODELS, {"normed": normed}):
        return train(world, changes)


def found(trainer: Trainer) -> dict[str, Any]:
    return plain(
        {
            "model": trainer.parts.model.state_dict(),
            "momentum": [state.get("momentum_buffer") for state in trainer.parts.optimizer.state.values()],
            "masks": trainer.parts.topology.masks,
            "storage": trainer.parts.topology.storage,
            "updates": trainer.parts.topology.updates,
            "refreshes": trainer.parts.correction.refreshes,
            "steps": trainer.step,
            "history": trainer.history,
        }
    )


def alone(changes: dict[str, Any], double: bool = True) -> dict[str, Any]:
    return train(ALONE, changes, double)


def train_and_resume(world: World, folder: str, changes: dict[str, Any], after: int) -> list[dict[str, Any]]:
    """Train a run, and resume a copy of it after `after` steps; return the final states of both."""
    recipe = make_recipe(tiny(**changes, checkpoint={"steps": after, "keep": 100, "best": False}))
    path = Path(folder)
    whole = Trainer(recipe, RunFolder.create(path / "whole", recipe.raw, 100) if world.leads else None, world=world)
    whole.run()
    if world.leads:
        RunFolder.create(path / "broken", recipe.raw, 100)
        (path / "broken" / "checkpoints").mkdir()
        name = f"step-{after:09d}.safetensors"
        (path / "broken" / "checkpoints" / name).write_bytes((path / "whole/checkpoints" / name).read_bytes())
    world.all_gather_object(None)  # until the file is there
    resumed = resume(RunFolder(path / "broken"), recipe, world=world)
    assert resumed.step == after
    resumed.run()
    return [found(whole) | {"random": torch.get_rng_state()}, found(resumed) | {"random": torch.get_rng_state()}]


# Comparisons


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name].astype(float) - right[name]).max(initial=0)) for name in left)


def assert_equal_runs(several: list[dict[str, Any]], one: dict[str, Any], tolerance: float) -> None:
    """The models of several processes are bit-identical, and equal to that of one process within the tolerance."""
    first, *others = several
    for other in others:
        for part in ("model", "masks"):
            assert all(np.array_equal(value, other[part][name]) for name, value in first[part].items())
    assert all(np.array_equal(mask, one["masks"][name]) for name, mask in first["masks"].items())
    assert largest_difference(first["model"], one["model"]) < tolerance
    assert (first["steps"], first["updates"], first["refreshes"]) == (one["steps"], one["updates"], one["refreshes"])


@contextmanager
def counted_collectives(counts: dict[str, int]) -> Iterator[None]:
    """Count the collectives by name during the block."""
    names = ["all_reduce", "all_gather", "all_gather_object", "gather_object", "broadcast", "broadcast_object_list"]
    kept = {name: getattr(torch.distributed, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return kept[name](*arguments, **options)

        return call

    try:
        for name in names:
            setattr(torch.distributed, name, counting(name))
        yield
    finally:
        for name in names:
            setattr(torch.distributed, name, kept[name])
