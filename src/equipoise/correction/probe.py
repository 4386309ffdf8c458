"""A measurement on a few batches: does the correction of the next epoch pay?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.correction.batches import LossFunction, check_losses
from equipoise.correction.coefficient import Coefficient, GradientCoefficient
from equipoise.correction.estimator import Estimator
from equipoise.correction.gradients import Batch
from equipoise.correction.model_runner import Runner
from equipoise.correction.snapshot import RandomState


class Decision(NamedTuple):
    """Correct until the next refresh if √(variance left x cost) + 1/√m < 1.

    The first term is the error of a corrected gradient relative to that of a larger batch of the same cost. The second
    is the error of g̃ if it is the running mean of the few old gradients between two refreshes; otherwise it is 0.

    Attributes:
        steps: m, the number of steps between refreshes; 0 if g̃ is of a whole epoch.
    """

    variance_left: float
    cost: float
    weight: float
    steps: int = 0

    @property
    def corrects(self) -> bool:
        error_of_mean = self.steps**-0.5 if self.steps else 0.0
        return max(self.variance_left * self.cost, 0.0) ** 0.5 + error_of_mean < 1

    def report(self) -> dict[str, float]:
        return {"pays": float(self.corrects), "probe_variance_left": self.variance_left, "probe_weight": self.weight}


def decide(
    estimator: Estimator,
    runner: Runner,
    coefficient: Coefficient,
    batches: list[Batch],
    loss_fn: LossFunction,
    progress: float,
    cost: float,
) -> Decision:
    """Measure (Var(new) + w²·Var(old) - 2w·Cov) / Var(new) between the live weights and the previous snapshot.

    The previous snapshot is one refresh old, and so will the next one be at the end of its epoch. The measured
    variance is therefore that of the last step of the next epoch: a cautious estimate. Without a previous snapshot
    nothing is corrected.
    """
    if not runner.snapshot or len(batches) < 2:
        return Decision(1.0, cost, 0.0)
    vector = runner.gradients.active_vector(runner.parameters, runner.topology)
    losses, gradients = [], []
    for batch in batches:
        random = RandomState(runner.device)
        old = runner.old_gradient(loss_fn, batch, vector)
        random.restore()
        new = runner.gradient(loss_fn, batch, vector)
        losses.append(torch.stack([new[0], old[0]]))
        gradients.append(torch.stack([new[1], old[1]]))
    all_losses, all_gradients = runner.world.all_reduce_mean([torch.stack(losses), torch.stack(gradients)])
    check_losses(all_losses[:, 0], "the probe")
    coefficient.observe_losses(*all_losses.unbind(1))
    new_variance, old_variance, covariance = _moments(all_gradients)
    if isinstance(coefficient, GradientCoefficient):  # its moving average is of younger snapshots
        weight = estimator.gamma * coefficient.from_moments(covariance, old_variance)
    else:
        weight = float(estimator.gamma * coefficient.value(progress))
    change = weight * weight * old_variance - 2 * weight * covariance
    left = 1.0 if new_variance == 0 else 1 + change / new_variance
    # Steps that are not corrected keep all of their variance.
    steps = estimator.every if estimator.mode == "running" else 0
    return Decision(1 - estimator.step_fraction * (1 - left), cost, weight, steps)


def _moments(gradients: Tensor) -> tuple[float, float, float]:
    """Return Var(new), Var(old) and Cov, each times the number of batches, of gradients [batches, 2, size]."""
    new, old = (gradients - gradients.mean(0)).unbind(1)
    return float((new * new).sum()), float((old * old).sum()), float((new * old).sum())
