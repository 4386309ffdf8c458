"""The cost of a run and of its network: FLOPs by layer, passes over samples, seconds, memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from equipoise.analysis.flops import LayerCost, SamplePasses, count, total
from equipoise.topology import GMP
from equipoise.training.trainer import Trainer


def measure_cost(trainer: Trainer) -> dict[str, Any]:
    """Count the FLOPs of one image at the current densities, and the cost of the run so far.

    Returns:
        inference, training: FLOPs of one image, dense and sparse.
        run: FLOPs since the first step. The sparse ones are `None` if densities have changed during the run, because
            only the current ones are known.
        passes: Passes over samples, including attacks and dense gradients for growth.
        seconds: Seconds of training.
        peak_memory: Of the GPU, in bytes; `None` on a CPU.
        parameters, active: Numbers of weights.
        layers: FLOPs of one image by layer.
    """
    layers = layer_costs(trainer)
    image, passes = total(layers), passes_so_far(trainer)
    topology = trainer.parts.topology
    sparse = {id(layer.parameter) for layer in topology.layers}
    others = sum(p.numel() for p in trainer.parts.model.parameters() if id(p) not in sparse)
    return {
        "inference": {"dense": image.dense_forward, "sparse": image.sparse_forward},
        "training": {"dense": image.dense_training, "sparse": image.sparse_training},
        "run": {
            "dense": passes.dense_flops(image),
            "sparse": passes.sparse_flops(image) if _same_density(trainer) else None,
        },
        "passes": asdict(passes),
        "seconds": trainer.seconds,
        "peak_memory": _peak_memory(trainer),
        "parameters": others + topology.size,
        "active": others + topology.active,
        "layers": [asdict(layer) for layer in layers],
    }


def layer_costs(trainer: Trainer) -> list[LayerCost]:
    """Count the FLOPs of one image by layer."""
    parts = trainer.parts
    densities = {layer.name: layer.active / layer.size for layer in parts.topology.layers if layer.index is None}
    return count(parts.model, torch.zeros(1, *parts.train.image_shape, device=parts.device), densities)


def passes_so_far(trainer: Trainer) -> SamplePasses:
    """Count the passes of the run over samples, from its passes over batches and its mean batch size."""
    parts, objective = trainer.parts, trainer.recipe.objective
    size = trainer.images / trainer.step if trainer.step else 0.0
    forward, backward = (
        round(parts.correction.passes[kind] * trainer.recipe.loss_passes * size) for kind in ("forward", "backward")
    )
    wish = parts.topology.algorithm.dense_gradient
    steps = {"never": 0, "at updates": parts.topology.updates, "always": parts.topology.steps}[wish]
    attack = SamplePasses.attack(round(trainer.parts.batches.attacks * size), objective.attack_passes)
    return SamplePasses(forward, backward, backward, min(backward, round(steps * size))) + attack


def _same_density(trainer: Trainer) -> bool:
    """Whether all steps had the current density, to 1 %. BSR-Net drifts, GMP and GraNet prune during training."""
    topology = trainer.parts.topology
    near = all(abs(line["density"] - topology.density) <= 0.01 * topology.density for line in _lines(trainer))
    return near and not isinstance(topology.algorithm, GMP)


def _lines(trainer: Trainer) -> list[dict[str, Any]]:
    return trainer.history if trainer.folder is None else trainer.folder.metrics()


def _peak_memory(trainer: Trainer) -> int | None:
    """Read the value of the last epoch from the metrics; this process may run on another device."""
    lines = _lines(trainer)
    return lines[-1].get("peak_memory") if lines else None
