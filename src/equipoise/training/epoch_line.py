"""The metrics of one epoch, as a line of metrics.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from equipoise.training.evaluate import Score

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


def epoch_line(trainer: Trainer, scores: dict[str, Score]) -> dict[str, Any]:
    """Everything that is known about the epoch that has just ended."""
    parts = trainer.parts
    on_gpu = parts.device.type == "cuda"
    meter = parts.meter.all_reduce(trainer.world)
    return {
        "epoch": trainer.epoch + 1,
        "step": trainer.step,
        "learning_rate": trainer.learning_rate,
        "train_loss": meter.loss,
        "train_accuracy": meter.accuracy,
        "split": parts.judged_on,
        "scores": {name: {"loss": s.loss, "accuracy": s.accuracy} for name, s in scores.items()},
        "density": parts.topology.density,
        "exploration": parts.topology.exploration,
        "updates": parts.topology.updates,
        "correction": parts.correction.report(),
        "passes": _passes(trainer),
        "seconds": trainer.seconds,
        "startup_seconds": trainer.startup_seconds,
        "images_per_second": trainer.images / max(trainer.seconds, 1e-9),
        "peak_memory": torch.cuda.max_memory_allocated(parts.device) if on_gpu else None,
        **({"rollbacks": trainer.rollbacks} if trainer.recipe.rollback.times else {}),
    }


def _passes(trainer: Trainer) -> dict[str, int]:
    """Passes over batches so far. A pass of an attack, forward and backward to the images, is counted separately."""
    recipe = trainer.recipe
    passes = {kind: count * recipe.loss_passes for kind, count in trainer.parts.correction.passes.items()}
    if recipe.objective.attack_passes:
        passes["attack"] = trainer.parts.batches.attacks * recipe.objective.attack_passes
    return passes
