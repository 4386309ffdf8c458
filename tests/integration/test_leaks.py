"""A long run holds no more memory than a short one."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.training import RunFolder, Trainer, make_recipe
from equipoise.training.watchers import Watcher
from train_helpers import tiny

EARLY, LATE = 500, 5000
STATM = Path("/proc/self/statm")


def tensors() -> tuple[int, int]:
    """The number of live tensors, and their bytes."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at some objects of torch is deprecated
        found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return len(found), sum(each.nbytes for each in found)


def resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory(Watcher):
    def __init__(self) -> None:
        self.at: dict[int, tuple[int, int, int]] = {}

    def step(self, trainer: Trainer) -> None:
        if trainer.step in (EARLY, LATE):
            self.at[trainer.step] = (*tensors(), resident())


CASES: dict[str, dict[str, Any]] = {
    "rigl, agent by replay, packed": {
        "topology": {"name": "rigl", "sparsity": 0.9, "every": 10},
        "correction": {"name": "agent", "mode": "replay", "every": 50},
        "storage": "packed",
    },
    "set, agent by recomputing, masked": {
        "topology": {"name": "set", "sparsity": 0.9, "every": 10},
        "correction": {"name": "agent", "mode": "recompute", "every": 300},
        "storage": "masked",
    },
    "granet, mvr, adam, masked": {
        "topology": {"name": "granet", "sparsity": 0.9, "every": 10},
        "correction": "mvr",
        "optimizer": {"name": "adam", "lr": 0.001},
        "storage": "masked",
    },
}


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("case", CASES)
def test_memory_after_5000_steps_is_that_after_500(tmp_path: Path, case: str) -> None:
    """With topology updates, refreshes, evaluations and checkpoints; within 1 %."""
    raw = tiny(**{"data": {"name": "digits", "batch": 8}, "epochs": 28, "checkpoint": {"steps": 100}, **CASES[case]})
    watcher = Memory()
    made = Trainer(make_recipe(raw), RunFolder.create(tmp_path / "run", raw), watcher)
    assert made.total_steps > LATE
    made.run()
    early, late = watcher.at[EARLY], watcher.at[LATE]
    assert made.parts.topology.updates > 100 or case.startswith("granet")
    for what, before, after in zip(("tensors", "bytes of tensors", "resident bytes"), early, late, strict=True):
        assert after <= before * 1.01, f"{what}: {before} after {EARLY} steps, {after} after {LATE}"
