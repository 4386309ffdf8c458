"""Two processes that PyTorch Lightning and the Hugging Face Trainer train with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler

import equipoise as eq
from distributed_helpers import Processes, largest_difference
from equipoise.world import World
from framework_helpers import BATCH, BATCHES, CLIP, data, network, own_loop, weights

pytestmark = pytest.mark.xdist_group("frameworks")

AGENT = eq.Agent(gamma=1.0, coefficient="gradient")
STOP = BATCHES // 2 + 2  # optimizer steps of two accumulated batches: inside the second epoch


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2, preload=("lightning.pytorch", "transformers.trainer", "equipoise.training"))
    yield found
    found.end()


def lightning_runs(world: World, folder: str) -> list[dict[str, Any]]:
    """Fit the problem of one process, on half of each batch; then once more with an interruption."""
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_helpers import Module, fit

    def run(name: str, **more: Any) -> dict[str, Any]:
        sampler: Any = DistributedSampler(data(), shuffle=False)  # Lightning's would shuffle
        loader = DataLoader(data(), batch_size=BATCH // 2, sampler=sampler)
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP, "devices": 2, "strategy": DDPStrategy()}
        module, sparse, trainer = fit(
            Path(folder) / name, AGENT, module=Module(network()), loader=loader, **options, **more
        )
        assert trainer.world_size == 2
        assert sparse.topology is not None
        return {"weights": weights(module), "masks": sparse.topology.masks}

    whole = run("whole")
    run("broken", stop_after=2 * BATCHES)
    return [whole, run("broken", resume=str(Path(folder) / "broken" / "last.ckpt"))]


def transformers_runs(world: World, folder: str) -> list[dict[str, Any]]:
    """The same with the Trainer, whose interruption is inside an epoch."""
    from transformers_helpers import train

    def run(name: str, **more: Any) -> dict[str, Any]:
        options = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", "ddp_backend": "gloo"}
        size = {"per_device_train_batch_size": BATCH // 2}
        trainer, sparse = train(Path(folder) / name, AGENT, **options, **size, **more)
        assert trainer.args.world_size == 2
        assert sparse.topology is not None
        return {"weights": weights(trainer.model), "masks": sparse.topology.masks}

    whole = run("whole")
    run("broken", stop_after=STOP)
    return [whole, run("broken", resume=str(Path(folder) / "broken" / f"checkpoint-{STOP}"))]


def check(found: list[list[dict[str, Any]]], model: Any) -> None:
    """Both processes are those of one process, and bit-identical after an interruption."""
    expected, topology = own_loop(model, AGENT, accumulated=2)
    reference = {name: value.numpy() for name, value in expected.items()}
    for whole, resumed in found:
        assert largest_difference(whole["weights"], reference) < 1e-12
        assert all(np.array_equal(mask, topology.masks[name]) for name, mask in whole["masks"].items())
        for part in ("weights", "masks"):
            assert all(np.array_equal(value, whole[part][name]) for name, value in resumed[part].items())


def test_lightning_with_two_processes(two: Processes, tmp_path: Path) -> None:
    from lightning_helpers import Module

    check(two(lightning_runs, str(tmp_path)), Module(network()))


def test_transformers_with_two_processes(two: Processes, tmp_path: Path) -> None:
    from transformers_helpers import Model

    check(two(transformers_runs, str(tmp_path)), Model())
