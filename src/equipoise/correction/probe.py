"""Does the correction pay? A measurement on a few batches before an epoch is corrected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from equipoise.correction.finite import check_finite
from equipoise.correction.snapshot import Random

if TYPE_CHECKING:
    from equipoise.correction.correction import Correction, LossFunction


class Decision(NamedTuple):
    """Correct the coming epoch where variance left x cost < 1: there it beats a bigger batch of the same cost."""

    variance_left: float
    cost: float
    weight: float

    @property
    def corrects(self) -> bool:
        return self.variance_left * self.cost < 1

    def report(self) -> dict[str, float]:
        return {"pays": float(self.corrects), "probe_variance_left": self.variance_left, "probe_weight": self.weight}


def decide(correction: Correction, batches: list[tuple[Any, ...]], loss_fn: LossFunction) -> Decision:
    """Var(new) + w²·Var(old) - 2w·Cov, over Var(new), between the weights of now and the previous snapshot.

    The previous snapshot is one refresh old, as the coming one will be at its end: the estimate is that of the last
    step of the coming epoch, and so a cautious one. Without a previous snapshot nothing is corrected.
    """
    if not correction.snapshot or len(batches) < 2:
        return Decision(1.0, correction.cost, 0.0)
    coordinates = correction.make_coordinates(correction.parameters, correction.topology)
    losses, gradients = [], []
    for batch in batches:
        random = Random(correction.device)
        with correction.snapshot.at():
            old = correction.run(loss_fn, batch, coordinates)
        random.restore()
        new = correction.run(loss_fn, batch, coordinates)
        losses.append(torch.stack([new[0], old[0]]))
        gradients.append(torch.stack([new[1], old[1]]))
    found = correction.world.all_reduce_mean([torch.stack(losses), torch.stack(gradients)])
    check_finite(found[0][:, 0], "the probe")
    return _judge(correction, *found)


def _judge(correction: Correction, losses: Tensor, gradients: Tensor) -> Decision:
    estimator, coefficient = correction.estimator, correction.coefficient
    new, old = (gradients - gradients.mean(0)).unbind(1)
    variance_new, variance_old, covariance = ((a * b).sum().item() for a, b in ((new, new), (old, old), (new, old)))
    coefficient.see_losses(*losses.unbind(1))
    weight = correction.weight
    if coefficient.needs_gradients:  # it has learnt from other ages; these pairs are of the age in question
        c = covariance / variance_old if variance_old > 0 else 0.0
        weight = estimator.gamma * (min(max(c, 0.0), 1.0) if estimator.clamp else c)
    w = float(weight.mean()) if isinstance(weight, Tensor) else float(weight)
    left = 1.0 if variance_new == 0 else 1 + (w * w * variance_old - 2 * w * covariance) / variance_new
    # steps that are not corrected keep all of theirs
    return Decision(1 - estimator.step_fraction * (1 - left), correction.cost, w)
