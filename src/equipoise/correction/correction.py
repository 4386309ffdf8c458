"""A correction at work: snapshot, full gradient and coefficient of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.correction.active_vector import Coordinates
from equipoise.correction.all_reduce import average_gradients
from equipoise.correction.coefficient import Weight
from equipoise.correction.containers import as_tuple, copied
from equipoise.correction.cost import Plan, make_plan
from equipoise.correction.estimator import Estimator
from equipoise.correction.finite import check_finite
from equipoise.correction.modes import SOURCES, TABLE_TYPES, Old, Pair
from equipoise.correction.probe import Decision, decide
from equipoise.correction.snapshot import Random, Snapshot, without_trace
from equipoise.correction.step_statistics import Statistics
from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.topology import Topology
from equipoise.world import World, by_itself

LossFunction = Callable[..., Tensor]  # (model, *batch) -> mean loss of the batch
Batches = Iterable[Any]  # of tuples or lists of arguments for the loss function

FEWEST_LOSSES = 8  # a covariance of losses is of at least so many batches, unless `loss_share` says otherwise


class Correction:
    """Made by `Estimator.attach`. In a training loop: `refresh` once an epoch, `backward` for every batch.

        correction = Agent(gamma=0.1).attach(model, topology)
        for epoch in range(epochs):
            correction.refresh(batches, loss_fn)           # snapshot, full gradient, coefficient
            for x, y in loader:
                loss = correction.backward(loss_fn, x, y)  # .grad += corrected gradient
                optimizer.step()
                optimizer.zero_grad()

    `loss_fn(model, *batch)` returns the mean loss. A weight is corrected where it was active at the snapshot and is
    active now; one grown since has no old gradient and takes the batch gradient until the next refresh, which keeps
    the estimate unbiased. Neither method leaves a trace in running statistics or random number streams beyond what
    plain training does.

    Of several processes (`world`, found by itself where the model is in DistributedDataParallel) each runs its share
    of every batch and corrects it by its own share of g_old and g̃. All of this is linear, so one all-reduce of the
    corrected gradient makes it that of the whole batch. Losses, and what the coefficient learns from, are averaged.
    """

    def __init__(
        self,
        estimator: Estimator,
        model: nn.Module,
        topology: Topology | None = None,
        total_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        self.estimator = estimator
        self.model = model
        self.topology = Topology.of(model) if topology is None else topology
        self.total_steps = total_steps
        self.seed = seed
        self.world = World.of(model)
        self.coefficient = estimator.make_coefficient()
        self.snapshot = Snapshot(model)
        self.source = SOURCES[estimator.source](self.snapshot, TABLE_TYPES[estimator.table])
        self.statistics = Statistics()
        self.decision: Decision | None = None
        self.steps = 0  # in all
        self.steps_since_refresh = 0
        self.refreshes = 0
        self.passes = {"forward": 0, "backward": 0}  # over batches, the steps' own included
        self.cost = estimator.cost  # a loop whose steps do more than a forward and a backward pass sets its own
        self.enabled = False
        self._mode: bool | None = None  # train or eval, of the last full pass
        # what a training step that computes gradients in its own way puts in place of these
        self.make_coordinates: Callable[..., Coordinates] = Coordinates
        self.backpropagate: Callable[[Tensor], None] = Tensor.backward
        self._pairs: list[tuple[Tensor, Tensor]] = []  # losses at hand, where no full pass compares them
        self._check()

    def _check(self) -> None:
        estimator = self.estimator
        if estimator.coefficient == "linear" and not self.total_steps:
            raise UserError("a linear coefficient needs total_steps, the steps it falls to zero in, in attach()")
        if not self.parameters:
            raise UserError("the model has no trainable parameter whose gradient could be corrected")
        if estimator.corrects:
            self._refuse_sparse_gradients()
        if self._every_place and estimator.corrects and estimator.source in ("previous", "table"):
            raise UserError('growth="corrected" needs old gradients of inactive weights; MVR and SAGA have none')

    def _refuse_sparse_gradients(self) -> None:
        """A corrected gradient has g̃ of all rows, and an optimizer for sparse gradients would not take it."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
                raise UserError(
                    f'"{name}" has sparse gradients, which cannot be corrected; make it with sparse=False'
                )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained now; some may be frozen or thawed on the way."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _every_place(self) -> bool:
        return self.topology is not None and self.topology.grows_by_corrected

    def _make_coordinates(self) -> Coordinates:
        """The weights that can be corrected from now on."""
        return self.make_coordinates(self.parameters, self.topology, self._every_place)

    def plan(self, batches: int) -> Plan:
        """What the correction will cost in epochs of so many batches: passes and memory."""
        plan = make_plan(self.estimator, self._make_coordinates(), self.snapshot.bytes, batches)
        return plan._replace(cost=self.cost)

    # Refresh

    def refresh(self, batches: Batches, loss_fn: LossFunction, epoch: int | None = None) -> None:
        """Take a new snapshot, its full gradient g̃, and c from how related the losses at the previous one still are.

        `batches` are tuples of arguments for `loss_fn`; with `replay` they must be the coming epoch's, in order.
        """
        if not self.estimator.corrects:
            return
        epoch = self.refreshes if epoch is None else epoch
        self.refreshes += 1
        self.steps_since_refresh = 0
        self.enabled = False  # should anything go wrong, nothing is half corrected
        corrects = epoch >= self.estimator.from_epoch
        if corrects and self.estimator.when == "pays":
            corrects, batches = self._probe(batches, loss_fn)
        if corrects:
            self._renew(batches, loss_fn)
        else:
            self.source.pause()
        if self.estimator.keeps_snapshot and not (corrects and self.snapshot and self.estimator.source == "previous"):
            self.snapshot.take()
        self.enabled, self._mode = corrects, self.model.training

    def _probe(self, batches: Batches, loss_fn: LossFunction) -> tuple[bool, Batches]:
        """Measure on a few batches whether the coming epoch is worth correcting; return the batches unused."""
        with without_trace(self.model, self.device):
            few = [as_tuple(batch) for batch in islice(batches, self.estimator.probe)]
            self.decision = decide(self, few, loss_fn)
        # A loader begins again, an iterator goes on.
        return self.decision.corrects, chain(few, batches) if isinstance(batches, Iterator) else batches

    def _renew(self, batches: Batches, loss_fn: LossFunction) -> None:
        total = length_hint(batches, -1)
        coordinates = self._make_coordinates()
        self.coefficient.restart(len(coordinates.sizes))
        self._use_pairs_at_hand()
        if self.source.coordinates is None and total > 0:
            self.plan(total).check(self.device)
        self.source.start(coordinates, total if total >= 0 else None)
        if self.source.full_pass:
            with without_trace(self.model, self.device):
                self._full_pass(coordinates, batches, total, loss_fn)
            self.source.end_full_pass()

    def _use_pairs_at_hand(self) -> None:
        if len(self._pairs) > 1 and self.estimator.when == "always":  # else the probe has compared losses
            self._see_losses(self._pairs)
        self._pairs = []

    def _see_losses(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.coefficient.see_losses(
            *self.world.all_reduce_mean([torch.stack(side) for side in zip(*pairs, strict=True)])
        )

    def _chosen(self, total: int) -> set[int] | None:
        """Which batches g̃ is computed on; None: all."""
        if self.estimator.batch_fraction == 1:
            return None
        if total < 0:
            raise UserError("batch_fraction needs the number of batches: give refresh a loader with a length")
        generator = torch.Generator().manual_seed(derive(self.seed, "fraction", self.refreshes))
        count = max(1, round(self.estimator.batch_fraction * total))
        return set(torch.randperm(total, generator=generator)[:count].tolist())

    def _full_pass(self, coordinates: Coordinates, batches: Batches, total: int, loss_fn: LossFunction) -> None:
        chosen = self._chosen(total)
        share = self._compared_share(total if chosen is None else len(chosen))
        numbers: list[int] = []
        losses, compared = [], []
        for number, batch in enumerate(batches):
            if chosen is not None and number not in chosen:
                continue
            random, arguments = Random(self.device), as_tuple(batch)
            compares = due(len(numbers), share)
            if compares:
                with torch.no_grad(), by_itself(self.model), self.snapshot.at():
                    old = loss_fn(self.model, *arguments).detach()
                self.passes["forward"] += 1
                random.restore()
            loss, gradient = self.run(loss_fn, arguments, coordinates)
            self.source.see(gradient, random)
            numbers.append(number)
            losses.append(loss)
            if compares:
                compared.append((loss, old))
        if not losses:
            raise UserError("refresh was given no batch")
        check_finite(self.world.all_reduce_mean([torch.stack(losses)])[0], "the full pass", numbers)
        if len(compared) > 1:
            self._see_losses(compared)

    def _compared_share(self, count: int) -> float:
        share = self.estimator.compared_share if self.snapshot else 0.0
        fewest = FEWEST_LOSSES if self.estimator.loss_share is None else 2
        return min(1.0, max(share, fewest / count)) if share and count > 0 else share

    def run(self, loss_fn: LossFunction, batch: tuple[Any, ...], coordinates: Coordinates) -> tuple[Tensor, Tensor]:
        """Loss and gradient at the coordinates, without touching `.grad`."""
        with torch.enable_grad(), by_itself(self.model):
            loss = loss_fn(self.model, *batch)
        self.passes["forward"] += 1
        self.passes["backward"] += 1
        return loss.detach(), coordinates.differentiate(loss)

    # Step

    def backward(self, loss_fn: LossFunction, *batch: Any, scale: float = 1.0, index: int | None = None) -> Tensor:
        """Add the corrected gradient of a batch to `.grad` and return its loss.

        scale: multiplies the gradient, for accumulation over k micro-batches (1/k) or loss scaling. The two cannot be
        told apart, so SNFS, which remembers gradients, remembers scaled ones unless the optimizer is fused and does
        the unscaling itself: then it knows the factor. MVR keeps one estimate a step and takes no micro-batches:
        below 1 it is refused. index: which of the fixed batches this is (SAGA).
        """
        if scale < 1 and self.estimator.source == "previous":
            raise UserError(f"scale={scale}: MVR takes the batch of a step at once, and not in micro-batches")
        if self.enabled and due(self.steps_since_refresh, self.estimator.step_fraction):
            loss = self._corrected_backward(loss_fn, batch, scale, index)
        else:
            loss = self._plain_backward(loss_fn, batch, scale)
            (loss,) = self._average(loss)
        self.count_step()
        return loss

    def _average(self, *others: Tensor) -> list[Tensor]:
        """All processes' gradients, in `.grad`, and the means of the others."""
        if self.world.alone:
            return list(others)
        return average_gradients(self.world, self.parameters, self.topology, others)

    def count_step(self, passes: int = 0) -> None:
        """A step has been taken; `passes` forward and backward passes of it were not made here."""
        self.steps += 1
        self.steps_since_refresh += 1
        for kind in self.passes:
            self.passes[kind] += passes

    def _corrected_backward(
        self, loss_fn: LossFunction, batch: tuple[Any, ...], scale: float, index: int | None
    ) -> Tensor:
        if self._mode is not None and self._mode != self.model.training:
            mode = "train" if self._mode else "eval"
            raise UserError(f"refresh ran in {mode} mode and this step does not; call model.train() before both")
        random = self.source.random() or Random(self.device)
        old = self.source.old(lambda: self._run_at_snapshot(loss_fn, batch), index)
        random.restore()
        coordinates = self.source.coordinates
        assert coordinates is not None
        before = coordinates.gradients() if any(p.grad is not None for p in coordinates.parameters) else None
        loss = self._plain_backward(loss_fn, batch, scale)
        new = coordinates.gradients()
        if before is not None:
            new -= before
        if scale != 1:
            new /= scale
        delta = None
        if old is None:
            (mean_loss,) = self._average(loss)
        else:
            pair = self._combine(coordinates, new, old, scale)
            delta, mean_loss = pair.delta, self._average_and_learn(loss, coordinates, new, old, pair)
        self.source.after(new, delta, index)
        if old is not None and old.loss is not None and self.coefficient.needs_losses and not self.source.full_pass:
            self._pairs.append((loss, old.loss))
        return mean_loss

    def _plain_backward(self, loss_fn: LossFunction, batch: tuple[Any, ...], scale: float) -> Tensor:
        with by_itself(self.model, live=True):
            loss = loss_fn(self.model, *batch)
            scaled = loss if scale == 1 else loss * scale
            topology = self.topology if self.enabled else None
            with nullcontext() if topology is None else topology.keeping_batch_gradient():
                self.backpropagate(scaled)
        self.passes["forward"] += 1
        self.passes["backward"] += 1
        return loss.detach()

    def _run_at_snapshot(self, loss_fn: LossFunction, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        assert self.source.coordinates is not None
        with self.snapshot.at():
            return self.run(loss_fn, batch, self.source.coordinates)

    @torch.no_grad()
    def _combine(self, coordinates: Coordinates, new: Tensor, old: Old, scale: float) -> Pair:
        """.grad -= w·(g_old - g̃) where both exist."""
        scatter = old.gradient - old.reference
        everywhere = scatter.clone() if self._growth_is_scored else None
        live = coordinates.live()
        if live is not None:
            new *= live  # at an update step the gradient of inactive weights is there too
        for kept in (live, old.known):
            if kept is not None:
                scatter *= kept
        weight = self.weight
        if not isinstance(weight, Tensor) and weight == 0:
            return Pair(scatter)
        if not isinstance(weight, Tensor):  # filled there: a copy would make the host wait for a GPU
            weight = torch.full((), weight, dtype=new.dtype, device=new.device)
        weight = coordinates.spread(weight) if weight.dim() else weight
        delta = scatter * -weight
        added = delta if everywhere is None else everywhere.mul_(-weight)
        coordinates.add_to_gradients(added if scale == 1 else added * scale)
        return Pair(scatter, delta, weight.mean())

    @torch.no_grad()
    def _average_and_learn(self, loss: Tensor, coordinates: Coordinates, new: Tensor, old: Old, pair: Pair) -> Tensor:
        """All processes' corrected gradients and loss; coefficient and statistics learn from the whole batch."""
        learns = self.coefficient.needs_gradients
        wanted = [loss, new, pair.delta, *((pair.scatter, old.reference) if learns else ())]
        means = iter(self._average(*(tensor for tensor in wanted if tensor is not None)))
        mean_loss, new = next(means), next(means)
        if pair.weight is not None:
            self.statistics.see(new, next(means), pair.weight, coordinates.made_at)
        if learns:
            scatter, reference = means
            self.coefficient.see_gradients(new - reference, scatter, coordinates.sizes, old.noise)
        return mean_loss

    @property
    def _growth_is_scored(self) -> bool:
        """Whether the coming topology update looks at the corrected gradient of all places."""
        return self._every_place and self.topology is not None and self.topology.update_is_next

    @property
    def weight(self) -> Weight:
        """w = γ·c, as the coming step will use it: one number, or one for every parameter."""
        progress = self.steps / self.total_steps if self.total_steps else 0.0
        return self.estimator.gamma * self.coefficient.value(progress)

    # Report and state

    def report(self) -> dict[str, Any]:
        """The epoch's numbers: c, ĉ, the weight applied, the norm of the correction, the variance left."""
        if not self.estimator.corrects:
            return {}
        found = {name: float(value) for name, value in self.coefficient.report().items()}
        if self.decision is not None:
            found |= self.decision.report()
        return found | self.statistics.report()

    def state_dict(self) -> dict[str, Any]:
        coordinates = self.source.coordinates
        return {
            "estimator": type(self.estimator).__name__,
            "counters": [self.steps, self.steps_since_refresh, self.refreshes, int(self.enabled)],
            "passes": dict(self.passes),
            "snapshot": self.snapshot.tensors,
            "coordinates": None if coordinates is None else coordinates.state_dict(),
            "coefficient": self.coefficient.state_dict(),
            "source": self.source.state_dict(),
            "statistics": self.statistics.state_dict(),
            "pairs": [list(pair) for pair in self._pairs],
            "decision": None if self.decision is None else list(self.decision),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        there, here = state["estimator"], type(self.estimator).__name__
        if there != here:
            raise UserError(f"the state is of {there}, this correction is {here}")
        self.snapshot.load(state["snapshot"])
        self.source.coordinates = None
        if state["coordinates"] is not None:
            self.source.coordinates = self._make_coordinates()
            self.source.coordinates.load_state_dict(state["coordinates"])
        state = copied(state, self.device)
        self.steps, self.steps_since_refresh, self.refreshes, enabled = state["counters"]
        self.enabled, self._mode = bool(enabled), None
        self.passes = state["passes"]
        self.coefficient.load_state_dict(state["coefficient"])
        self.source.load_state_dict(state["source"])
        self.statistics.load_state_dict(state["statistics"])
        self._pairs = [(new, old) for new, old in state["pairs"]]
        self.decision = None if state["decision"] is None else Decision(*state["decision"])


def due(i: int, share: float) -> bool:
    """Whether the i-th of a sequence is among an evenly spread share of it."""
    return int((i + 1) * share) > int(i * share)
