"""Whole runs with a pattern, in both storages, with and without a correction."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.training import Trainer, make_recipe
from train_helpers import tiny

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "2:4": {"name": "granet-fast", "sparsity": 0.5, "pattern": "2:4"},
    "4x1": {"name": "granet-fast", "sparsity": 0.7, "pattern": "4x1", "dense_last": True},
    "fan_in": {"name": "srigl-fast", "sparsity": 0.7},
}
OPTIONS: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": 32},
    "data": {"name": "digits", "batch": 60},
    "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9},
    "epochs": 3,
}


@pytest.mark.parametrize(("name", "correction"), [("2:4", "sgd"), ("4x1", "agent"), ("fan_in", "agent")])
def test_structured_runs_learn_the_digits_in_both_storages(name: str, correction: str) -> None:
    for storage in ("masked", "packed"):
        topology = TOPOLOGIES[name] | {"every": 8}
        trainer = Trainer(make_recipe(tiny(topology=topology, correction=correction, storage=storage, **OPTIONS)))
        trainer.run()
        made = trainer.parts.topology
        assert made.storage == storage
        assert made.updates > 5
        assert trainer.history[-1]["train_accuracy"] > 0.5
        for mask in made.masks.values():
            blocks = mask.view(len(mask) // 4, 4, -1).transpose(1, 2).reshape(-1, 4) if name == "4x1" else mask
            counts = set((mask.view(-1, 4) if name == "2:4" else blocks).sum(1).tolist())
            assert counts <= {"2:4": {2}, "4x1": {0, 4}, "fan_in": {0, max(counts)}}[name]
