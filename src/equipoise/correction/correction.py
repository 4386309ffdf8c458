"""A correction attached to a model: refreshes, steps, reports and state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain, islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checks import kind_of, require_whole
from equipoise.correction.accumulated import Accumulated
from equipoise.correction.batches import Batches, LossFunction, as_tuple
from equipoise.correction.coefficient import Linear, Weight
from equipoise.correction.corrected_step import CorrectedStep
from equipoise.correction.cost import CostEstimate, estimate_cost
from equipoise.correction.estimator import Estimator
from equipoise.correction.full_pass import FullPass, compare_losses, due
from equipoise.correction.gradients import Gradients
from equipoise.correction.model_runner import Runner
from equipoise.correction.modes import MODES, TABLE_TYPES
from equipoise.correction.probe import Decision, decide
from equipoise.correction.snapshot import RandomState, without_trace
from equipoise.correction.state import copy_state, number
from equipoise.errors import UserError
from equipoise.modules import require_model
from equipoise.shards import is_sharded
from equipoise.topology import Algorithm, Topology
from equipoise.world import World


class Correction:
    """Corrects the gradients of one model; made by `Estimator.attach`.

        correction = Agent(gamma=0.1).attach(model, topology)
        for epoch in range(epochs):
            correction.refresh(batches, loss_fn)           # snapshot, full gradient, coefficient
            for x, y in loader:
                loss = correction.backward(loss_fn, x, y)  # .grad += corrected gradient
                optimizer.step()
                optimizer.zero_grad()

    `loss_fn(model, *batch)` returns the mean loss. A weight is corrected if it was active at the snapshot and is
    active now. A weight grown since then has no old gradient and keeps its batch gradient until the next refresh, so
    the estimate stays unbiased. Both methods change running statistics and random number generators exactly as plain
    training does.

    With several processes each one runs its share of every batch and corrects it by its share of g_old and g̃. The
    correction is linear, so one all-reduce gives the corrected gradient of the whole batch. Losses, and the
    gradients that the coefficient observes, are averaged too.

    Args: see `Estimator.attach`.
    """

    def __init__(
        self,
        estimator: Estimator,
        model: nn.Module,
        topology: Topology | None,
        total_steps: int | None,
        seed: int,
        world: World | None,
        cost: float | None,
        gradients: Gradients | None,
        bn_trace: bool,
    ) -> None:
        _check_arguments(estimator, model, topology)
        _check_whole(model)
        self.estimator = estimator
        self.model = model
        self.topology = Topology.only(model, topology)
        self.total_steps = total_steps
        self.seed = seed
        self.cost = estimator.cost if cost is None else cost
        self._bn_trace = bn_trace
        world = World.of(model) if world is None else world
        self.runner = Runner(model, self.topology, world, gradients or Gradients())
        self.coefficient = estimator.make_coefficient()
        self.mode = MODES[estimator.mode](self.runner.snapshot, TABLE_TYPES[estimator.table])
        self.steps = 0
        self.steps_since_refresh = 0
        self.refreshes = 0
        self.enabled = False
        self.decision: Decision | None = None
        self._full_pass = FullPass(estimator, self.runner, self.mode, self.coefficient, seed)
        self._step = CorrectedStep(self.runner, self.mode, self.coefficient)
        self._accumulated = Accumulated(self.runner, self.mode)
        self._warned: set[str] = set()
        self._training: bool | None = None  # whether the model was in training mode at the last refresh
        self._check()

    def _check(self) -> None:
        estimator = self.estimator
        if isinstance(estimator.coefficient, Linear) and not self.total_steps:
            raise UserError("a linear coefficient needs total_steps in attach(): the steps in which it falls to zero")
        if not self.runner.parameters:
            raise UserError("the model has no trainable parameter whose gradient could be corrected")
        if not estimator.corrects:
            return
        if self.runner.every_index and estimator.mode in ("previous", "table"):
            raise UserError('growth="corrected" needs old gradients of inactive weights; MVR and SAGA have none')
        for name, module in self.model.named_modules():
            # g̃ has all rows, and optimizers for sparse gradients take no dense ones.
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
                raise UserError(f'"{name}" has sparse gradients, which cannot be corrected; use sparse=False')

    def __repr__(self) -> str:
        estimator = self.estimator
        corrects = "corrects" if self.corrects_next_step else "does not correct"
        counts = f"{self.steps} steps, {self.refreshes} refreshes"
        return (
            f"<{type(estimator).__name__}, {estimator.mode}: gamma {estimator.gamma}, {counts}, {corrects} the next>"
        )

    @property
    def passes(self) -> dict[str, int]:
        """Forward and backward passes over batches so far, including plain steps."""
        return self.runner.passes

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def weight(self) -> Weight:
        """w = γ·c of the next step: one number, or one per parameter."""
        return self.estimator.gamma * self.coefficient.value(self._progress)

    @property
    def _progress(self) -> float:
        return self.steps / self.total_steps if self.total_steps else 0.0

    def estimate_cost(self, batches: int) -> CostEstimate:
        """Estimate passes and memory for epochs with this number of batches."""
        vector, snapshot = self.runner.active_vector(), self.runner.snapshot
        return estimate_cost(self.estimator, vector, snapshot.bytes, batches, self.cost)

    # Refresh

    def refresh(self, batches: Batches, loss_fn: LossFunction, epoch: int | None = None) -> None:
        """Take a new snapshot, compute its full gradient g̃, and update the loss coefficient.

        Args:
            batches: Tuples of arguments for `loss_fn`. With `replay` they must be the coming batches, in order.
            loss_fn: Maps the model and a batch to the mean loss.
            epoch: The epoch, counted from 0, for `from_epoch`; by default the number of earlier refreshes.

        Raises:
            NonFiniteLoss: The loss of a batch is NaN or infinite.
            UserError: With `replay`, a step since the last refresh had another batch on a GPU than expected.
        """
        estimator = self.estimator
        if not estimator.corrects:
            return
        self.mode.verify()
        epoch = self.refreshes if epoch is None else epoch
        self.refreshes += 1
        self.steps_since_refresh = 0
        self.enabled = False  # and stays so if the refresh fails
        corrects = epoch >= estimator.from_epoch
        if corrects and estimator.when == "pays":
            corrects, batches = self._probe(batches, loss_fn)
        if corrects:
            self._renew(batches, loss_fn)
        else:
            self.mode.pause()
        if estimator.keeps_snapshot:
            self.mode.renew_snapshot()
        self.enabled, self._training = corrects, self.model.training

    def _probe(self, batches: Batches, loss_fn: LossFunction) -> tuple[bool, Batches]:
        """Decide on a few batches whether to correct the next epoch; return all batches, unused."""
        with without_trace(self.model, self.device):
            few = [as_tuple(batch) for batch in islice(batches, self.estimator.probe)]
            self.decision = decide(
                self.estimator, self.runner, self.coefficient, few, loss_fn, self._progress, self.cost
            )
        # A loader starts again, an iterator does not.
        return self.decision.corrects, chain(few, batches) if isinstance(batches, Iterator) else batches

    def _renew(self, batches: Batches, loss_fn: LossFunction) -> None:
        total = length_hint(batches, -1)
        vector = self.runner.active_vector()
        self.coefficient.restart(len(vector.sizes))
        if self.estimator.when == "always":  # otherwise the probe has compared losses
            compare_losses(self._step.loss_pairs, self.runner, self.coefficient)
        self._step.loss_pairs = []
        if self.mode.vector is None and total > 0:
            self.estimate_cost(total).check(self.device)
        self.mode.start(vector, total if total >= 0 else None)
        if self.mode.full_pass:
            with without_trace(self.model, self.device, self._bn_trace):
                self._full_pass.run(vector, batches, total, loss_fn, self.refreshes)
            self.mode.end_full_pass()

    # Step

    @property
    def corrects_next_step(self) -> bool:
        """Whether `backward` will correct the next step."""
        return self.enabled and due(self.steps_since_refresh, self.estimator.step_fraction)

    def count_step(self, passes: int = 0) -> None:
        """Count a step.

        Args:
            passes: Its forward and backward passes, if they ran outside of `backward`.
        """
        self.steps += 1
        self.steps_since_refresh += 1
        self.runner.count(passes)

    def backward(self, loss_fn: LossFunction, *batch: Any, scale: float = 1.0, index: int | None = None) -> Tensor:
        """Add the corrected gradient of a batch to `.grad` and return the loss.

        Args:
            loss_fn: Maps the model and the batch to the mean loss.
            *batch: The arguments of `loss_fn` after the model.
            scale: Factor of the gradient: 1/k to accumulate k micro-batches, or a loss scale. SNFS remembers scaled
                gradients, unless a fused optimizer unscales them itself. MVR keeps one estimate per step, so it takes
                no micro-batches and refuses a scale below 1.
            index: Which of the fixed batches this is (SAGA).

        Raises:
            UserError: With `replay`, the batch is not the one that `refresh` was given for this step. Values on a GPU
                are compared without waiting for it: the next `refresh`, `report` or `state_dict` raises the error.
        """
        _check_whole(self.model)
        self._begin_step(scale)
        if not self.corrects_next_step:
            loss = self.runner.backward(loss_fn, batch, scale)
            (loss,) = self.runner.all_reduce_mean(loss)
        else:
            self._check_training()
            loss = self._step.backward(loss_fn, batch, scale, index, self.weight)
        self.count_step()
        return loss

    def before_forward(self) -> None:
        """Prepare the forward pass of a loop that calls `correct`, so that both gradients share their dropout masks.

        With `replay` it sets the random number generators to the state of the stored gradient, as `backward` does. A
        model that draws no random numbers does not need it.
        """
        random = self.mode.random() if self.corrects_next_step else None
        if random is not None:
            random.restore()
        self._accumulated.start(random or RandomState(self.device))

    def correct(
        self,
        loss_fn: LossFunction,
        *batch: Any,
        scale: float = 1.0,
        index: int | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Correct the gradient in `.grad` after a backward pass of the caller.

        For loops that call `loss.backward()` themselves, such as the loops of frameworks:

            correction.before_forward()  # only if the model has dropout
            loss_fn(model, x, y).backward()
            correction.correct(loss_fn, x, y)

        It computes the same numbers as `backward`. Call it after every backward pass, also when accumulating. With
        DistributedDataParallel the wrapper averages the batch gradient and this method averages the correction.

        Args:
            loss_fn: Maps the model and the batch to the mean loss, computed as by the caller (autocast included).
            *batch: The arguments of `loss_fn` after the model.
            scale: Factor of the loss in the backward pass, as in `backward`.
            index: Which of the fixed batches this is (SAGA).
            loss: The mean loss that the caller has computed, without the factor. Only `running` with a loss
                coefficient needs it, and runs the batch forward if it is not given.

        Raises:
            UserError: As in `backward`.
        """
        self._begin_step(scale)
        if self.corrects_next_step:
            self._check_training()
            self._step.correct(loss_fn, batch, scale, index, self.weight, self._accumulated, loss)
        self._accumulated.start(None)
        self.count_step(passes=1)

    def _begin_step(self, scale: float) -> None:
        """Refuse a wrong step, and warn about a step that is probably a mistake."""
        if self.estimator.corrects and not self.refreshes:
            self._warn("a step before the first refresh is not corrected; call refresh(batches, loss_fn) first")
        if self.total_steps and self.steps == self.total_steps:
            self._warn(
                f"step {self.steps + 1} is past total_steps={self.total_steps}; attach with the number of steps"
            )
        if scale < 1 and self.estimator.mode == "previous":
            raise UserError(f"scale={scale}: MVR needs the whole batch of a step at once, without micro-batches")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)  # the caller of backward() or correct()

    def _check_training(self) -> None:
        if self._training is not None and self._training != self.model.training:
            mode = "training" if self._training else "evaluation"
            raise UserError(f"refresh ran in {mode} mode and this step does not; call model.train() before both")

    # Report and state

    def report(self) -> dict[str, Any]:
        """Return c, ĉ, the weight, the norm of the correction and the variance left since the last report."""
        if not self.estimator.corrects:
            return {}
        self.mode.verify()
        found = {name: float(value) for name, value in self.coefficient.report().items()}
        if self.decision is not None:
            found |= self.decision.report()
        return found | self._step.statistics.report()

    def state_dict(self) -> dict[str, Any]:
        vector = self.mode.vector
        return {
            "estimator": type(self.estimator).__name__,
            "counters": [self.steps, self.steps_since_refresh, self.refreshes, int(self.enabled)],
            "passes": dict(self.passes),
            "snapshot": self.runner.snapshot.tensors,
            "active_vector": None if vector is None else vector.state_dict(),
            "coefficient": self.coefficient.state_dict(),
            "mode": self.mode.state_dict(),
            "statistics": self._step.statistics.state_dict(),
            "loss_pairs": [list(pair) for pair in self._step.loss_pairs],
            "decision": None if self.decision is None else list(self.decision),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            UserError: The state belongs to another correction or to another model.
        """
        saved, here = state["estimator"], type(self.estimator).__name__
        if saved != here:
            raise UserError(f"the state belongs to {saved} and this correction is {here}")
        self.runner.snapshot.load(state["snapshot"])
        self.mode.vector = None
        if state["active_vector"] is not None:
            self.mode.vector = self.runner.active_vector()
            self.mode.vector.load_state_dict(state["active_vector"])
        state = copy_state(state, self.device)
        self.steps, self.steps_since_refresh, self.refreshes, enabled = state["counters"]
        require_whole(0, steps=self.steps, since=self.steps_since_refresh, refreshes=self.refreshes, enabled=enabled)
        self.enabled, self._training = bool(enabled), None
        self.passes.update(state["passes"])
        self.coefficient.load_state_dict(state["coefficient"])
        self.mode.load_state_dict(state["mode"])
        self._step.statistics.load_state_dict(state["statistics"])
        self._step.loss_pairs = [(new, old) for new, old in state["loss_pairs"]]
        self.decision = None if state["decision"] is None else Decision(*state["decision"])
        self._check_loaded()

    def _check_loaded(self) -> None:
        """Refuse loaded numbers that the next step or the next report could not use."""
        c = self.coefficient.value(0.0)
        if isinstance(c, Tensor) and c.dim() and len(c) != len(self.runner.parameters):
            raise UserError(f"the state has {len(c)} coefficients for {len(self.runner.parameters)} parameters")
        if not all(isinstance(loss, Tensor) and loss.dim() == 0 for loss in chain(*self._step.loss_pairs)):
            raise UserError("the state has losses that are not single numbers")
        if not all(map(number, self.decision or ())):
            raise UserError("the state has a decision that is not made of numbers")


def _check_whole(model: nn.Module) -> None:
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise UserError(
            "a correction keeps old gradients of whole parameters, which fully_shard does not support; "
            "use DistributedDataParallel"
        )


def _check_arguments(estimator: Estimator, model: object, topology: object) -> None:
    """Refuse arguments of other kinds, such as swapped ones."""
    call = f"{type(estimator).__name__}().attach(model, topology)"
    require_model(call, model)
    if isinstance(topology, Algorithm):
        raise UserError(f"{call}: pass what {type(topology).__name__}(...).attach(model, optimizer) returned")
    if topology is not None and not isinstance(topology, Topology):
        what = kind_of(topology)
        raise UserError(f"{call}: the topology is a {what}; leave it out, or pass what RigL().attach() returned")
