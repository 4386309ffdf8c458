"""Sparse training in the Hugging Face Trainer, compared with the same training in a loop without a framework."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise.errors import UserError
from framework_helpers import BATCHES, CORRECTIONS, EPOCHS, assert_equal, own_loop, topology, weights

pytestmark = pytest.mark.xdist_group("frameworks")


@pytest.mark.parametrize(
    ("name", "accumulated"),
    [("none", 2), ("agent", 1), ("agent", 2), ("replay", 2), ("running", 2), ("every", 1)],
)
def test_train_is_the_same_training_as_a_plain_loop(hf: Any, tmp_path: Path, name: str, accumulated: int) -> None:
    trainer, sparse = hf.train(
        tmp_path,
        CORRECTIONS[name],
        gradient_accumulation_steps=accumulated,
        train_sampling_strategy="sequential",
    )
    expected, expected_topology = own_loop(hf.Model(), CORRECTIONS[name], accumulated)
    assert_equal(weights(trainer.model), expected)
    assert sparse.topology is not None
    assert sparse.topology.updates == expected_topology.updates > 2
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == EPOCHS * BATCHES // accumulated
    assert logged[-1]["density"] == pytest.approx(0.3, abs=0.01)
    assert logged[-1]["exploration"] == expected_topology.exploration
    assert ("correction/weight" in logged[-1]) == (name != "none")


def test_a_checkpoint_is_cleared_of_what_a_killed_process_left(hf: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / ".equipoise.safetensors.0123.tmp").touch()
    hf.train(tmp_path, None, save_strategy="steps", save_steps=4, max_steps=4)
    assert (tmp_path / "checkpoint-4" / "equipoise.safetensors").exists()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(("name", "stop_after"), [("none", 8), ("agent", 8), ("replay", 6)])
def test_a_resumed_training_ends_with_the_weights_of_an_uninterrupted_one(
    hf: Any, tmp_path: Path, name: str, stop_after: int
) -> None:
    """A BERT with dropout, AdamW, shuffled batches of which two are accumulated, bf16 and clipping."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "bf16": True, "learning_rate": 0.01}

    def run(folder: str, **more: Any) -> Any:
        return hf.train(
            tmp_path / folder, CORRECTIONS[name], model=hf.bert(), dataset=hf.sentences(), **options, **more
        )

    whole, whole_sparse = run("whole")
    run("broken", stop_after=stop_after)
    resumed, sparse = run("broken", resume=True)
    assert resumed.state.global_step == EPOCHS * BATCHES // 2
    assert_equal(weights(resumed.model), weights(whole.model))
    assert_equal(sparse.topology.masks, whole_sparse.topology.masks)
    assert sparse.topology.exploration == whole_sparse.topology.exploration


def test_the_callback_alone_attaches_logs_and_resumes(hf: Any, tmp_path: Path) -> None:
    whole, sparse = hf.train(tmp_path / "whole", callback=True)
    hf.train(tmp_path / "broken", callback=True, stop_after=7)
    resumed, again = hf.train(tmp_path / "broken", callback=True, resume=True)
    assert_equal(weights(resumed.model), weights(whole.model))
    assert again.topology is not None
    assert sparse.topology is not None
    assert sparse.topology.updates == again.topology.updates
    assert resumed.state.log_history[-2]["density"] == pytest.approx(0.3, abs=0.01)


def test_a_trainer_resumes_from_a_folder_that_was_moved(hf: Any, tmp_path: Path) -> None:
    whole, _ = hf.train(tmp_path / "whole")
    hf.train(tmp_path / "broken", stop_after=7)
    shutil.move(tmp_path / "broken" / "checkpoint-7", tmp_path / "moved")
    resumed, _ = hf.train(tmp_path / "other", resume=str(tmp_path / "moved"))
    assert_equal(weights(resumed.model), weights(whole.model))
    with pytest.raises(UserError, match=r"there is no .*checkpoint-7/equipoise.safetensors.*resume_from=FOLDER"):
        hf.train(tmp_path / "another", callback=True, resume=str(tmp_path / "moved"))


def test_a_callback_that_finds_the_state_of_another_run_refuses_it(hf: Any, tmp_path: Path) -> None:
    hf.train(tmp_path / "one", callback=True, stop_after=7)
    hf.train(tmp_path / "two", callback=True, stop_after=7, data_seed=1)
    with pytest.raises(UserError, match="does not have the values of the loaded topology"):
        hf.train(tmp_path / "one", callback=True, resume=str(tmp_path / "two" / "checkpoint-7"))


def test_masks_are_those_of_the_best_model_at_the_end(hf: Any, tmp_path: Path) -> None:
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    at_steps: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 4, "eval_steps": 4}
    model = hf.Model()
    trainer = hf.SparseTrainer(
        model,
        hf.arguments(tmp_path, **best, **at_steps, greater_is_better=True),  # the highest loss is an early one
        train_dataset=hf.rows(),
        eval_dataset=hf.rows(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None),
        topology=topology(),
    )
    trainer.train()
    assert trainer.state.best_global_step < trainer.state.global_step
    for name, mask in trainer.sparse_training.topology.masks.items():
        weight = model.get_parameter(name)
        assert not torch.count_nonzero(weight[~mask])
        assert torch.count_nonzero(weight) > 0.9 * mask.sum()  # those just grown are zero


def test_a_callback_cannot_correct(hf: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not see the batches.*use SparseTrainer"):
        hf.train(tmp_path, eq.Agent(), callback=True)


def test_mvr_takes_no_accumulated_batches(hf: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gradient_accumulation_steps=1"):
        hf.train(tmp_path, eq.MVR(), gradient_accumulation_steps=2)
