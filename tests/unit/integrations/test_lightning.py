"""Sparse training in PyTorch Lightning, compared with the same training in a loop without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import equipoise as eq
from equipoise.errors import UserError
from framework_helpers import (
    BATCH,
    BATCHES,
    CLIP,
    CORRECTIONS,
    assert_equal,
    data,
    network,
    own_loop,
    topology,
    weights,
)

pytestmark = pytest.mark.xdist_group("frameworks")


@pytest.mark.parametrize(
    ("name", "accumulated"),
    [("none", 2), ("agent", 1), ("agent", 2), ("replay", 2), ("running", 2), ("every", 1)],
)
def test_fit_is_the_same_training_as_a_plain_loop(lit: Any, tmp_path: Path, name: str, accumulated: int) -> None:
    module, sparse, trainer = lit.fit(
        tmp_path, CORRECTIONS[name], accumulate_grad_batches=accumulated, gradient_clip_val=CLIP
    )
    expected, expected_topology = own_loop(lit.Module(network()), CORRECTIONS[name], accumulated)
    assert_equal(weights(module), expected)
    assert sparse.topology is not None
    assert sparse.topology.updates == expected_topology.updates > 2
    assert float(trainer.callback_metrics["density"]) == pytest.approx(0.3, abs=0.01)
    assert float(trainer.callback_metrics["exploration"]) == pytest.approx(expected_topology.exploration)
    assert ("correction/weight" in trainer.callback_metrics) == (name != "none")
    if name == "running":  # a pass at the live weights and one at the old ones for each batch
        assert sparse.correction.passes == {"forward": 2 * 4 * BATCHES, "backward": 2 * 4 * BATCHES}


class ResumableLoader(DataLoader[Any]):
    """Continues with the batch after the last one; Lightning saves its state."""

    start = taken = 0

    def __iter__(self) -> Any:
        self.taken, self.start = self.start, 0
        batches = super().__iter__()
        for _ in range(self.taken):
            next(batches)
        for batch in batches:
            self.taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken % len(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["taken"]


@pytest.mark.parametrize(
    ("name", "stop_after"),
    [("none", 2 * BATCHES + 4), ("agent", 2 * BATCHES), ("agent", 2 * BATCHES + 4), ("replay", 2 * BATCHES + 4)],
)
def test_a_resumed_fit_ends_with_the_weights_of_an_uninterrupted_one(
    lit: Any, tmp_path: Path, name: str, stop_after: int
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP, "precision": "bf16-mixed"}

    def run(folder: str, **more: Any) -> Any:
        loader = ResumableLoader(data(), batch_size=BATCH)
        return lit.fit(tmp_path / folder, CORRECTIONS[name], loader=loader, **options, **more)

    whole, whole_sparse, _ = run("whole")
    *_, broken = run("broken", stop_after=stop_after)
    assert broken.global_step == stop_after // 2
    resumed, sparse, trainer = run("broken", resume=str(tmp_path / "broken" / "last.ckpt"))
    assert trainer.global_step == 4 * BATCHES // 2
    assert_equal(weights(resumed), weights(whole))
    assert_equal(sparse.topology.masks, whole_sparse.topology.masks)
    assert sparse.topology.exploration == whole_sparse.topology.exploration


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_fit_draws_the_random_numbers_of_an_uninterrupted_one(
    lit: Any, tmp_path: Path, workers: int
) -> None:
    """Shuffled batches and dropout, from the checkpoint of an epoch."""

    def run(folder: str, **more: Any) -> Any:
        module = lit.Module(network(dropout=0.5))
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True, num_workers=workers)
        return lit.fit(tmp_path / folder, CORRECTIONS["agent"], module=module, loader=loader, every=0, **more)

    whole, *_ = run("whole")
    run("broken", stop_after=2 * BATCHES)
    resumed, *_ = run("broken", resume=str(tmp_path / "broken" / "last.ckpt"))
    assert_equal(weights(resumed), weights(whole))


def test_replay_needs_an_order_that_follows_from_the_epoch(lit: Any, tmp_path: Path) -> None:
    def loader(**order: Any) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=BATCH, **order)

    with pytest.raises(UserError, match=r"another batch in a step than in refresh.*a sampler with set_epoch"):
        lit.fit(tmp_path, CORRECTIONS["replay"], loader=loader(shuffle=True))
    sampler = DistributedSampler(data(), num_replicas=1, rank=0)
    _, sparse, trainer = lit.fit(tmp_path, CORRECTIONS["replay"], loader=loader(sampler=sampler))
    assert trainer.current_epoch == sampler.epoch + 1 == 4
    assert sparse.correction.passes["backward"] == 2 * 4 * BATCHES


def test_a_packed_model_is_fitted_and_resumed(lit: Any, tmp_path: Path) -> None:
    def packed() -> Any:
        return lit.Module(eq.sparse.pack(network().float(), topology()))

    x, y = data().tensors
    loader = DataLoader(torch.utils.data.TensorDataset(x.float(), y), batch_size=BATCH)
    whole, sparse, _ = lit.fit(tmp_path / "whole", module=packed(), loader=loader)
    assert sparse.topology is not None
    assert sparse.topology.storage == "packed"
    lit.fit(tmp_path / "broken", module=packed(), loader=loader, stop_after=2 * BATCHES)
    resumed, *_ = lit.fit(
        tmp_path / "broken", module=packed(), loader=loader, resume=str(tmp_path / "broken" / "last.ckpt")
    )
    assert_equal(weights(resumed), weights(whole))


def test_passes_of_the_correction_are_not_logged(lit: Any, tmp_path: Path) -> None:
    """A coefficient of zero changes no weight, but the passes at the old weights have other losses."""
    *_, plain = lit.fit(tmp_path / "plain")
    *_, corrected = lit.fit(tmp_path / "corrected", eq.FixedC(coefficient={"value": 0.0}))
    assert float(corrected.callback_metrics["loss"]) == float(plain.callback_metrics["loss"])


def test_the_loss_of_the_correction_may_be_another_function(lit: Any, tmp_path: Path) -> None:
    seen = []

    def loss_fn(module: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        seen.append(batch_idx)
        return module.training_step(batch, batch_idx)

    sparse = lit.SparseTraining(topology(), eq.SVRG(), loss_fn=loss_fn)
    lit.fit(tmp_path, sparse=sparse, stop_after=BATCHES)
    assert seen == [*range(BATCHES), *range(BATCHES)]  # the full pass, then one pass for each step


def test_the_hooks_are_gone_after_fit(lit: Any, tmp_path: Path) -> None:
    module, sparse, _ = lit.fit(tmp_path, stop_after=1)
    assert sparse.topology is not None
    assert not sparse.topology.attached
    assert eq.Topology.of(module) is None


def test_a_checkpoint_of_a_dense_run_is_refused(lit: Any, tmp_path: Path) -> None:
    dense = lit.pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    dense.fit(lit.Module(network()), DataLoader(data(), batch_size=BATCH))
    dense.save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(UserError, match=r"saved without SparseTraining.*without ckpt_path"):
        lit.fit(tmp_path, resume=str(tmp_path / "dense.ckpt"))


def test_a_checkpoint_with_another_correction_is_refused(lit: Any, tmp_path: Path) -> None:
    lit.fit(tmp_path, stop_after=BATCHES)
    with pytest.raises(UserError, match="saved without a correction"):
        lit.fit(tmp_path, eq.Agent(), resume=str(tmp_path / "last.ckpt"))


def test_two_optimizers_are_refused(lit: Any, tmp_path: Path) -> None:
    class Two(lit.Module):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.model[0], self.model[3])]

    with pytest.raises(UserError, match="one optimizer and configure_optimizers returns 2"):
        lit.fit(tmp_path, module=Two(network()))


def test_saga_is_refused(lit: Any) -> None:
    with pytest.raises(UserError, match="SAGA needs the same batches"):
        lit.SparseTraining(topology(), eq.SAGA())


@pytest.mark.slow  # imports another copy of Lightning
def test_the_trainer_of_pytorch_lightning(lit: Any, tmp_path: Path) -> None:
    pl: Any = pytest.importorskip("pytorch_lightning")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        training_step = lit.Module.training_step
        configure_optimizers = lit.Module.configure_optimizers

    sparse, module = lit.SparseTraining(topology(), CORRECTIONS["agent"]), Module()
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=[sparse], default_root_dir=tmp_path, logger=False)
    trainer.fit(module, DataLoader(data(), batch_size=BATCH))
    plain, *_ = lit.fit(tmp_path, CORRECTIONS["agent"])
    assert_equal(weights(module), weights(plain))
