"""The corrected step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    """What one step has added to the gradient: delta = -w·deviation."""

    deviation: Tensor  # g_old - g̃, zero at weights that are not corrected
    delta: Tensor | None = None  # None if w is 0
    weight: Tensor | None = None  # the mean of w


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
        loss, new = self._batch_gradient(loss_fn, batch, scale)
        if old is None:
            (mean_loss,) = runner.all_reduce_mean(loss)
            mode.end_step(new, None, index)
            return mean_loss
        applied = self._correct(new, old, scale, weight)
        mean_loss = self._all_reduce_and_learn(loss, new, old, applied)
        mode.end_step(new, applied.delta, index)
        if old.loss is not None and self._coefficient.needs_losses and not mode.full_pass:
            self.loss_pairs.append((loss, old.loss))
        return mean_loss

    @property
    def _vector(self) -> ActiveVector:
        assert self._mode.vector is not None
        return self._mode.vector

    def _batch_gradient(self, loss_fn: LossFunction, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """Run the batch at the live weights; return its loss and its unscaled gradient alone."""
        gradients, vector = self._runner.gradients, self._vector
        before = None if gradients.is_empty(vector.parameters) else gradients.read(vector)
        loss = self._runner.backward(loss_fn, batch, scale)
        new = gradients.read(vector)
        if before is not None:
            new -= before
        if scale != 1:
            new /= scale
        return loss, new

    @torch.no_grad()
    def _correct(self, new: Tensor, old: OldGradient, scale: float, weight: Weight) -> Applied:
        """Add -w·(g_old - g̃) at the weights that were active at the snapshot and are active now."""
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
        delta = deviation * -weight
        self._runner.gradients.add(vector, delta if scale == 1 else delta * scale)
        if everywhere is not None and self._runner.topology is not None:
            self._runner.topology.growth.add(vector.parameters, vector.unpack(everywhere.mul_(-weight * scale)))
        return Applied(deviation, delta, weight.mean())

    @property
    def _growth_is_next(self) -> bool:
        """Whether the next topology update scores inactive weights by the corrected gradient."""
        topology = self._runner.topology
        return topology is not None and topology.growth.corrected and topology.update_is_next

    @torch.no_grad()
    def _all_reduce_and_learn(self, loss: Tensor, new: Tensor, old: OldGradient, applied: Applied) -> Tensor:
        """Average gradients and loss over the processes; coefficient and statistics observe the whole batch."""
        learns = self._coefficient.needs_gradients
        wanted = [loss, new, applied.delta, *((applied.deviation, old.reference) if learns else ())]
        means = iter(self._runner.all_reduce_mean(*(tensor for tensor in wanted if tensor is not None)))
        mean_loss, new = next(means), next(means)
        if applied.weight is not None:
            self.statistics.observe(new, next(means), applied.weight, self._vector.made_at)
        if learns:
            deviation, reference = means
            self._coefficient.observe_gradients(new - reference, deviation, self._vector.sizes, old.noise)
        return mean_loss
