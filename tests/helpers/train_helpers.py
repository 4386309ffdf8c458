"""A run of milliseconds, and the comparison of two runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.training import Trainer, make_recipe
from equipoise.training import checkpoint as checkpoints

BATCHES = 6  # of an epoch of `tiny`
TIMES = {"seconds", "startup_seconds", "images_per_second"}


def tiny(**changes: Any) -> dict[str, Any]:
    """A recipe: a perceptron on the digits, six steps per epoch."""
    base: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": 16},
        "data": {"name": "digits", "batch": 240},
        "topology": {"name": "set", "sparsity": 0.8, "every": 4},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "epochs": 2,
        "ema": 0.9,
        "bn_recalibration_batches": 2,
    }
    return {**base, **changes}


def trainer(**changes: Any) -> Trainer:
    return Trainer(make_recipe(tiny(**changes)))


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """All values inside nested containers, by path."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        return {path: value}
    return {
        name: leaf for key, item in pairs for name, leaf in leaves(item, f"{path}/{type(key).__name__} {key}").items()
    }


def same(left: Any, right: Any) -> bool:
    """Whether two values are bit-identical; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    return type(left) is type(right) and (left == right or (left != left and right != right))


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_state(left: Any, right: Any, without: str = "") -> None:
    """Two nested states are bit-identical, except for values whose path ends with `without`."""
    a, b = leaves(left), leaves(right)
    assert a.keys() == b.keys(), f"only in one: {sorted(a.keys() ^ b.keys())[:5]}"
    differing = [name for name in a if not same(a[name], b[name]) and not (without and name.endswith(without))]
    assert not differing, f"{len(differing)} of {len(a)} differ: {differing[:5]}"


@contextmanager
def held_by_another_process(run: Path) -> Iterator[None]:
    """Another process holds the lock of a run during the block."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True)"
    code += "; input()"
    command = [sys.executable, "-c", code, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.kill()


def without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMES}


def assert_same_runs(left: Path, right: Path) -> None:
    """Two finished runs are bit-identical, except for their times."""
    names = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (left, right)]
    assert names[0] == names[1], names
    for name in names[0]:
        states = [checkpoints.load(run / "checkpoints" / name) for run in (left, right)]
        assert_same_state(states[0], states[1], without="str seconds")
    for name in ("metrics.jsonl", "result.json"):
        texts = [(run / name).read_text() for run in (left, right)]
        records = [
            [json.loads(line) for line in text.splitlines()] if "jsonl" in name else [json.loads(text)]
            for text in texts
        ]
        assert [without_times(line) for line in records[0]] == [without_times(line) for line in records[1]]
