"""Whole runs with a pattern, in both storages, with and without a correction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import UserError
from equipoise.training import RunFolder, Trainer, make_recipe, resume
from train_helpers import assert_same_runs, tiny

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


def test_sr_ste_resumes_to_the_bit(tmp_path: Path) -> None:
    raw = tiny(topology={"name": "sr-ste"}, correction="agent", epochs=4)
    recipe = make_recipe(raw)
    Trainer(recipe, RunFolder.create(tmp_path / "whole", raw, 2)).run()
    folder = RunFolder.create(tmp_path / "half", raw, 2)
    half = Trainer(recipe, folder)
    for _ in range(2):
        half.run_epoch()
    resumed = resume(folder, recipe)
    assert resumed.epoch == 2
    resumed.run()
    assert_same_runs(tmp_path / "whole", tmp_path / "half")
    with pytest.raises(UserError, match="storage=packed: SR-STE trains the inactive weights too; use storage=masked"):
        Trainer(make_recipe(raw | {"storage": "packed"}))


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
