"""The corrected step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.correction.accumulated import Accumulated
from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.batches import LossFunction
from equipoise.correction.coefficient import Coefficient, Weight
from equipoise.correction.full_pass import LossPair
from equipoise.correction.gradients import Batch
from equipoise.correction.model_runner import Runner
from equipoise.correction.modes import Mode, OldGradient
from equipoise.correction.snapshot import RandomState
from equipoise.correction.step_statistics import StepStatistics


class Applied(NamedTuple):
    """The correction that one step has added to the gradient: delta = -w·deviation."""

    deviation: Tensor  # g_old - g̃, zero at weights that are not corrected
    delta: Tensor | None = None  # None if w is 0
    weight: Tensor | None = None  # the mean of w
    growth: Tensor | None = None  # scaled delta of all weights, if growth looks at the corrected gradient


class CorrectedStep:
    """Adds g_new - w·(g_old - g̃) to the accumulated gradients."""

    def __init__(self, runner: Runner, mode: Mode, coefficient: Coefficient) -> None:
        self._runner = runner
        self._mode = mode
        self._coefficient = coefficient
        self.statistics = StepStatistics()
        self.loss_pairs: list[LossPair] = []  # of the steps since the refresh, if no full pass compares losses

    def backward(
        self, loss_fn: LossFunction, batch: Batch, scale: float, index: int | None, weight: Weight
    ) -> Tensor:
        """Run the step with weight w; return the loss, averaged over the processes."""
        runner, mode = self._runner, self._mode
        mode.check(batch)
        random = mode.random() or RandomState(runner.device)
        old = mode.old(lambda: runner.old_gradient(loss_fn, batch, self._vector), index)
        random.restore()  # both passes draw the same dropout masks
        before = runner.gradients.read_or_none(self._vector)
        loss = runner.backward(loss_fn, batch, scale)
        new = self._batch_gradient(before, scale)
        if old is None:
            (mean_loss,) = runner.all_reduce_mean(loss)
            mode.end_step(new, None, index)
            return mean_loss
        applied = self._correction_of(new, old, scale, weight)
        self._add(applied, scale)
        mean_loss, *means = runner.all_reduce_mean(loss, *self._observed(new, old, applied))
        self._learn(means, old, applied)
        self._end(loss, new, old, applied, index)
        return mean_loss

    def correct(
        self,
        loss_fn: LossFunction,
        batch: Batch,
        scale: float,
        index: int | None,
        weight: Weight,
        accumulated: Accumulated,
        loss: Tensor | None,
    ) -> None:
        """Correct the gradient that a backward pass of the caller has added to `.grad`.

        The caller, or DistributedDataParallel for it, averages the batch gradient over the processes: only the
        correction is averaged here.
        """
        runner, mode = self._runner, self._mode
        mode.check(batch)
        accumulated.stop()
        after = RandomState(runner.device)
        if accumulated.random is not None:
            accumulated.random.restore()
        if loss is None and self._compares_losses:
            loss = runner.live_loss(loss_fn, batch)
        old = mode.old(lambda: runner.old_gradient(loss_fn, batch, self._vector), index)
        accumulated.check_random(after)
        after.restore()
        new = self._batch_gradient(accumulated.before(self._vector), scale)
        if old is None:
            mode.end_step(new, None, index)
            return
        applied = self._correction_of(new, old, scale, weight)
        means = runner.world.all_reduce_mean(self._observed(new, old, applied))
        if applied.delta is not None:
            applied = applied._replace(delta=means[1])
        self._add(applied, scale)
        self._learn(means, old, applied)
        self._end(loss, new, old, applied, index)

    @property
    def _vector(self) -> ActiveVector:
        assert self._mode.vector is not None
        return self._mode.vector

    @property
    def _compares_losses(self) -> bool:
        """Whether the coefficient needs the losses of the steps, because no full pass compares losses."""
        return self._coefficient.needs_losses and not self._mode.full_pass

    def _batch_gradient(self, before: Tensor | None, scale: float) -> Tensor:
        """Return the unscaled gradient of the batch alone, given the gradient accumulated before it."""
        new = self._runner.gradients.read(self._vector)
        if before is not None:
            new -= before
        if scale != 1:
            new /= scale
        return new

    @torch.no_grad()
    def _correction_of(self, new: Tensor, old: OldGradient, scale: float, weight: Weight) -> Applied:
        """Return -w·(g_old - g̃), zero at weights that were inactive at the snapshot or are inactive now."""
        vector = self._vector
        deviation = old.gradient - old.reference
        everywhere = deviation.clone() if self._growth_is_next else None
        live = vector.live()
        for mask in (live, old.known):
            if mask is not None:
                deviation *= mask
        if not isinstance(weight, Tensor):
            if weight == 0:
                return Applied(deviation)
            weight = torch.full((), weight, dtype=new.dtype, device=new.device)  # does not wait for a GPU
        weight = vector.spread(weight) if weight.dim() else weight
        growth = None if everywhere is None else everywhere.mul_(-weight * scale)
        return Applied(deviation, deviation * -weight, weight.mean(), growth)

    @torch.no_grad()
    def _add(self, applied: Applied, scale: float) -> None:
        """Add the correction to the accumulated gradients, and to those that growth looks at."""
        vector, delta, growth = self._vector, applied.delta, applied.growth
        if delta is not None:
            self._runner.gradients.add(vector, delta if scale == 1 else delta * scale)
        if growth is not None and self._runner.topology is not None:
            self._runner.topology.growth.add(vector.parameters, vector.unpack(growth))

    @property
    def _growth_is_next(self) -> bool:
        """Whether the next topology update scores inactive weights by the corrected gradient."""
        topology = self._runner.topology
        return topology is not None and topology.growth.corrected and topology.update_is_next

    def _observed(self, new: Tensor, old: OldGradient, applied: Applied) -> list[Tensor]:
        """Return the tensors that coefficient and statistics observe, to be averaged over the processes."""
        wanted = [new] if applied.delta is None else [new, applied.delta]
        return [*wanted, applied.deviation, old.reference] if self._coefficient.needs_gradients else wanted

    @torch.no_grad()
    def _learn(self, means: Sequence[Tensor], old: OldGradient, applied: Applied) -> None:
        """Update coefficient and statistics from the means of `_observed` over the processes."""
        new, *others = means
        if applied.weight is not None:
            self.statistics.observe(new, others.pop(0), applied.weight, self._vector.made_at)
        if self._coefficient.needs_gradients:
            deviation, reference = others
            self._coefficient.observe_gradients(new - reference, deviation, self._vector.sizes, old.noise)

    def _end(self, loss: Tensor | None, new: Tensor, old: OldGradient, applied: Applied, index: int | None) -> None:
        self._mode.end_step(new, applied.delta, index)
        if loss is not None and old.loss is not None and self._compares_losses:
            self.loss_pairs.append((loss.detach(), old.loss))
