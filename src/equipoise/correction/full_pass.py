"""The full pass of a refresh: all batches at the new snapshot."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.batches import Batches, LossFunction, as_tuple, check_losses
from equipoise.correction.coefficient import Coefficient, Loss
from equipoise.correction.estimator import Estimator
from equipoise.correction.model_runner import Runner
from equipoise.correction.modes import Mode
from equipoise.correction.snapshot import RandomState
from equipoise.errors import UserError
from equipoise.seeds import derive

FEWEST_LOSSES = 8  # batches that the loss coefficient compares at least, unless it has a batch_fraction

LossPair = tuple[Tensor, Tensor]  # of one batch, at the live weights and at the snapshot


class FullPass:
    """Runs batches at the live weights, which become the new snapshot.

    The mode records the gradients. The coefficient observes the losses and those at the previous snapshot.
    """

    def __init__(self, estimator: Estimator, runner: Runner, mode: Mode, coefficient: Coefficient, seed: int) -> None:
        self._estimator, self._runner, self._mode, self._coefficient = estimator, runner, mode, coefficient
        self._seed = seed

    def run(self, vector: ActiveVector, batches: Batches, total: int, loss_fn: LossFunction, refresh: int) -> None:
        """Run the batches, `total` of them (negative if unknown), for the refresh with this number."""
        runner = self._runner
        chosen = choose_batches(total, self._estimator.batch_fraction, self._seed, refresh)
        compared_fraction = self._compared_fraction(total if chosen is None else len(chosen))
        numbers: list[int] = []
        losses: list[Tensor] = []
        pairs: list[LossPair] = []
        for number, batch in enumerate(batches):
            if chosen is not None and number not in chosen:
                continue
            random, arguments = RandomState(runner.device), as_tuple(batch)
            self._mode.expect(arguments)
            compares = due(len(numbers), compared_fraction)
            if compares:
                old = runner.old_loss(loss_fn, arguments)
                random.restore()
            loss, gradient = runner.gradient(loss_fn, arguments, vector)
            self._mode.record(gradient, random)
            numbers.append(number)
            losses.append(loss)
            if compares:
                pairs.append((loss, old))
        if not losses:
            raise UserError("refresh got no batches; give it the batches of an epoch")
        check_losses(runner.world.all_reduce_mean([torch.stack(losses)])[0], "the full pass", numbers)
        compare_losses(pairs, runner, self._coefficient)

    def _compared_fraction(self, count: int) -> float:
        fraction = self._estimator.compared_fraction if self._runner.snapshot else 0.0
        options = self._estimator.coefficient
        fewest = FEWEST_LOSSES if isinstance(options, Loss) and options.batch_fraction is None else 2
        return min(1.0, max(fraction, fewest / count)) if fraction and count > 0 else fraction


def compare_losses(pairs: list[LossPair], runner: Runner, coefficient: Coefficient) -> None:
    """Update the coefficient from losses at the live weights and at the snapshot, averaged over the processes."""
    if len(pairs) > 1:
        new, old = runner.world.all_reduce_mean([torch.stack(side) for side in zip(*pairs, strict=True)])
        coefficient.observe_losses(new, old)


def choose_batches(total: int, fraction: float, seed: int, refresh: int) -> set[int] | None:
    """Draw the indices of the batches that g̃ is computed on, new ones at every refresh; None: all."""
    if fraction == 1:
        return None
    if total < 0:
        raise UserError("batch_fraction needs the number of batches: give refresh a loader with a length")
    generator = torch.Generator().manual_seed(derive(seed, "fraction", refresh))
    return set(torch.randperm(total, generator=generator)[: max(1, round(fraction * total))].tolist())


def due(i: int, fraction: float) -> bool:
    """Whether the i-th element of a sequence is in an evenly spread fraction of it."""
    return int((i + 1) * fraction) > int(i * fraction)
