"""The training step as recorded work of the GPU: compiled, captured, and without a wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from equipoise.correction import Gradients
from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.batches import LossFunction
from equipoise.data import Loader
from equipoise.objectives import Objective, Standard
from equipoise.seeds import derive
from equipoise.topology import Topology
from equipoise.training.batch import BatchMaker
from equipoise.training.flat import Flat, FlatVector
from equipoise.training.graphs import Graphs
from equipoise.training.parts import autocast
from equipoise.training.rule import RULES
from equipoise.training.update import Update

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


FIRST_STEPS = 3  # run, recorded, replayed
Loss = Callable[..., tuple[Tensor, Tensor]]  # of a prepared batch: loss and logits


class Wanted(NamedTuple):
    """A batch by name: of which epoch, which one, whether attacked, and what seeds the attack."""

    epoch: int
    batch: int
    attacked: bool
    purpose: tuple[str | int, ...] = ()


def obstacle(trainer: Trainer) -> str:
    """Why the steps of a trainer cannot be captured, or ""."""
    parts, recipe = trainer.parts, trainer.recipe
    if not trainer.world.alone:
        return "several processes average their gradients in between"
    if not isinstance(parts.train, Loader):
        return "the images are not on the device"
    if any(isinstance(module, _DropoutNd) for module in parts.model.modules()):
        return "dropout draws new numbers in every pass"
    if type(parts.optimizer) not in RULES:
        return f"{type(parts.optimizer).__name__} is not known there"
    if any(not p.requires_grad for p in parts.model.parameters()):
        return "some parameters are frozen"
    if recipe.correction.when == "pays" and recipe.objective.attack_passes and not trainer.full_pass_is_clean:
        return "a probe cannot attack ahead"
    return ""


class CapturedStep:
    """Takes the steps and refreshes of a trainer.

    All tensors of a step stay where they are: parameters, gradients, momentum, masks and averages as one vector each
    (`Flat`), the batch, the learning rate and the other numbers that change. An ordinary step is one CUDA graph:
    batch, augmentation, attack, forward and backward, optimizer, masks, average, meter. A corrected one is a few
    graphs with the correction's own code between them, on vectors of the size of the active weights: it runs far
    ahead of the device. Steps that update the topology take the gradient from a graph and the rest as in eager mode.

    compile, capture: what of this to do; with neither the same code runs anywhere, which is how it is tested.
    """

    def __init__(self, trainer: Trainer, compile: bool = True, capture: bool = True) -> None:
        self.trainer = trainer
        parts = trainer.parts
        self._compile = compile
        self.flat = Flat(parts.optimizer, parts.topology)
        self.generator = torch.Generator(parts.device)
        self.batches = BatchMaker(parts.train, self._compiled)  # type: ignore[arg-type]
        self.update = Update(parts.optimizer, parts.topology, parts.average, self.flat, self._compiled)
        rewiring = self.update.rewiring
        generators = [self.generator] if rewiring is None else [self.generator, rewiring.generator]
        self.graphs = Graphs(parts.device, generators, capture, trainer.count_startup)
        self.loss_value = torch.zeros((), dtype=self.flat.dtype, device=parts.device)
        self.number = torch.zeros((), dtype=torch.int64, device=parts.device)
        self.sums = trainer.meter.sums
        self._batch: dict[tuple[bool, int], tuple[Tensor, ...]] = {}
        self._logits: dict[int, Tensor] = {}
        self._current: Wanted | None = None
        self._steps = 0
        self._tally = self._compiled(tally)
        self._model: nn.Module = cast(nn.Module, self._compiled(parts.model))
        own = trainer.recipe.objective
        clean = Standard() if trainer.full_pass_is_clean else own
        self._losses = {False: loss_function(trainer, clean), True: loss_function(trainer, own)}
        self._compiled_losses = {attacked: self._compiled(loss) for attacked, loss in self._losses.items()}
        parts.correction.use(CapturedGradients(self))

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if self._compile else function

    # What a trainer calls

    def step(self) -> int:
        """The step of the batch that the trainer stands at; how many images it was on."""
        trainer = self.trainer
        correction = trainer.parts.correction
        wanted = Wanted(trainer.epoch, trainer.batch, self._attacks)
        self._keep_meter()
        self.number.fill_(trainer.batch)
        size = self.batches.place(wanted.epoch, wanted.batch)
        if not correction.corrects_next_step and self._updates_on_the_device:
            self._seed(wanted)
            self.update.set_numbers()
            self._current = wanted
            self.graphs(("step", size), partial(self._whole_step, wanted, size))
            correction.count_step(passes=1)
            self.update.count_step()
            return self._done(size)
        if wanted.attacked:
            self.prepare(wanted)
        index = (
            trainer.parts.train.index(trainer.epoch, trainer.batch) if correction.estimator.fixed_batches else None
        )
        correction.backward(self.loss, wanted, index=index)
        if self._updates_on_the_device:
            self.update.set_numbers()
            self.graphs(("end", size), partial(self._end_step, wanted, size))
            self.update.count_step()
        else:
            self.graphs(("tally", size), partial(self._count, wanted, size))
            self._update_eagerly()
        return self._done(size)

    def _done(self, size: int) -> int:
        self._steps += 1
        return size

    @property
    def works(self) -> bool:
        """Whether steps have been compiled, captured and replayed."""
        return self._steps >= FIRST_STEPS

    def release(self) -> None:
        """Leave everything as eager steps want it."""
        self.settle()
        self.trainer.parts.correction.use(Gradients())

    def refresh(self, first: int, count: int) -> None:
        """A refresh of the correction on the batches of the steps `first`, `first + 1`, ..."""
        trainer = self.trainer
        coming = Coming(self, first, count)
        trainer.parts.correction.refresh(coming, self.loss, trainer.epoch)

    def settle(self) -> None:
        """Bring what the host knows up to date with the device."""
        self.update.settle()

    # Batches

    @property
    def _attacks(self) -> bool:
        return self.trainer.recipe.objective.attack_passes > 0

    def prepare(self, wanted: Wanted) -> None:
        """Make a batch, attack included, where the passes read it."""
        size = self.batches.place(wanted.epoch, wanted.batch)
        self._seed(wanted)
        self.graphs(("batch", wanted.attacked, size), partial(self._make_batch, wanted.attacked, size))
        self._current = wanted

    def _seed(self, wanted: Wanted) -> None:
        trainer = self.trainer
        if wanted.attacked:
            trainer.attacks += 1
            self.generator.manual_seed(derive(trainer.recipe.seed, "attack", trainer.step, *wanted.purpose))

    def _make_batch(self, attacked: bool, size: int) -> None:
        trainer = self.trainer
        x, y = self.batches(size)
        made: tuple[Tensor, ...] = (x, y)
        if attacked:
            model = self._model if size == self.batches.usual else trainer.parts.model
            with autocast(trainer.recipe, trainer.parts.device):
                made = trainer.recipe.objective.prepare(model, x, y, self.generator)
        elif not self._attacks:
            made = trainer.recipe.objective.prepare(trainer.parts.model, x, y, None)
        if (attacked, size) not in self._batch:
            self._batch[attacked, size] = tuple(torch.empty_like(tensor) for tensor in made)
        for there, tensor in zip(self._batch[attacked, size], made, strict=True):
            there.copy_(tensor)

    # Passes

    def loss(self, model: nn.Module, wanted: Wanted) -> Tensor:
        """The mean loss of a batch at the weights that the model has now; its gradient is in `flat.gradients`."""
        fresh = wanted != self._current
        if fresh and wanted.attacked:
            self.prepare(wanted)
            fresh = False
        size = self.batches.place(wanted.epoch, wanted.batch)
        self._current = wanted
        work = self._differentiate if torch.is_grad_enabled() else self._evaluate
        # the snapshot puts its own tensors in place of the live ones: the same work at other addresses
        weights = next(model.parameters()).data_ptr()
        key = (work.__name__, fresh, wanted.attacked, size, weights)
        self.graphs(key, partial(self._pass, work, fresh, wanted, size))
        return self.loss_value.clone()

    def _pass(self, work: Callable[[Wanted, int], None], fresh: bool, wanted: Wanted, size: int) -> None:
        if fresh:
            self._make_batch(wanted.attacked, size)
        work(wanted, size)

    def _loss_of(self, wanted: Wanted, size: int) -> tuple[Tensor, Tensor]:
        """Compiled for the usual size only: a last, smaller batch is not worth the time that takes."""
        functions = self._compiled_losses if size == self.batches.usual else self._losses
        with torch.enable_grad():  # also where no gradient is wanted: one compilation serves both
            return functions[wanted.attacked](*self._batch[wanted.attacked, size])

    def _differentiate(self, wanted: Wanted, size: int) -> None:
        loss, logits = self._loss_of(wanted, size)
        found = torch.autograd.grad(loss, [slot.parameter for slot in self.flat.slots], allow_unused=True)
        views = self.flat.gradient_views
        used = [(view, gradient) for view, gradient in zip(views, found, strict=True) if gradient is not None]
        if len(used) < len(views):
            self.flat.gradients.zero_()
        torch._foreach_copy_([view for view, _ in used], [gradient for _, gradient in used])
        self.loss_value.copy_(loss.detach())
        self._keep_logits(logits.detach(), size)

    def _evaluate(self, wanted: Wanted, size: int) -> None:
        self.loss_value.copy_(self._loss_of(wanted, size)[0].detach())

    def _keep_logits(self, logits: Tensor, size: int) -> None:
        if size not in self._logits:
            self._logits[size] = torch.empty_like(logits)
        self._logits[size].copy_(logits)

    # The rest of a step

    def _whole_step(self, wanted: Wanted, size: int) -> None:
        self._make_batch(wanted.attacked, size)
        self._differentiate(wanted, size)
        self._end_step(wanted, size)

    def _end_step(self, wanted: Wanted, size: int) -> None:
        self._count(wanted, size)
        self.update()

    def _count(self, wanted: Wanted, size: int) -> None:
        labels = self._batch[wanted.attacked, size][1]
        self._tally(self.sums, self.loss_value, self._logits[size], labels, self.number)

    def _keep_meter(self) -> None:
        """A new epoch has a new meter; the sums stay where the graphs know them."""
        meter = self.trainer.meter
        if meter.sums is not self.sums:
            self.sums.copy_(meter.sums)
            meter.sums = self.sums

    @property
    def _updates_on_the_device(self) -> bool:
        """Whether the coming step is ordinary: no topology update, no dense gradient to watch, no clipping."""
        topology = self.trainer.parts.topology
        watches = topology.algorithm.dense_gradient == "always" and bool(topology.layers)
        return not (topology.update_is_next or watches or self.trainer.recipe.clip)

    def show_gradients(self) -> None:
        """In place of a backward pass: the gradients have been computed with the loss."""
        if self._updates_on_the_device:
            return
        for slot, view in zip(self.flat.slots, self.flat.gradient_views, strict=True):
            slot.parameter.grad = view
        self.trainer.parts.topology.see_gradients()

    def _update_eagerly(self) -> None:
        trainer = self.trainer
        self.settle()
        trainer.apply_gradients()
        self.update.follow_optimizer()


class CapturedGradients(Gradients):
    """The passes of a captured step: they leave the gradients of the last pass in one vector."""

    def __init__(self, step: CapturedStep) -> None:
        self._step, self._flat = step, step.flat

    def active_vector(
        self, parameters: Sequence[nn.Parameter], topology: Topology | None, every_index: bool = False
    ) -> FlatVector:
        return FlatVector(self._flat, parameters, topology, every_index)

    def differentiate(
        self, loss_fn: LossFunction, model: nn.Module, batch: tuple[Any, ...], vector: ActiveVector
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            loss = loss_fn(model, *batch)
        return loss, self._flat.gradients.index_select(0, _positions(vector))

    def propagate(self, loss: Tensor) -> None:
        self._step.show_gradients()

    def is_empty(self, parameters: Sequence[nn.Parameter]) -> bool:
        return True

    def read(self, vector: ActiveVector) -> Tensor:
        found, live = self._flat.gradients.index_select(0, _positions(vector)), vector.live()
        return found if live is None else found.mul_(live)  # masks are applied later than in eager mode

    def add(self, vector: ActiveVector, delta: Tensor) -> None:
        self._flat.gradients.index_add_(0, _positions(vector), delta.to(self._flat.dtype))


def _positions(vector: ActiveVector) -> Tensor:
    assert isinstance(vector, FlatVector)
    return vector.positions


class Coming:
    """The batches of a refresh, each made when its turn comes."""

    def __init__(self, step: CapturedStep, first: int, count: int) -> None:
        self._step, self._first, self._count = step, first, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Wanted]]:
        trainer = self._step.trainer
        attacked = trainer.recipe.objective.attack_passes > 0 and not trainer.full_pass_is_clean
        for i in range(self._count):
            wanted = Wanted(*divmod(self._first + i, len(trainer.parts.train)), attacked, ("refresh", i))
            if attacked:
                self._step.prepare(wanted)  # now, at the live weights
            yield (wanted,)


@torch.no_grad()
def tally(sums: Tensor, loss: Tensor, logits: Tensor, labels: Tensor, number: Tensor) -> None:
    """What `Meter.see` does, with the number of the batch as a tensor."""
    images = float(len(labels))
    loss = loss.double()
    correct = (logits.argmax(1) == labels).sum().double()
    bad = torch.where(loss.isfinite(), sums[3], torch.minimum(sums[3], number.double()))
    sums.copy_(torch.stack([sums[0] + loss * images, sums[1] + correct, sums[2] + images, bad]))


def loss_function(trainer: Trainer, objective: Objective) -> Loss:
    recipe, device, model = trainer.recipe, trainer.parts.device, trainer.parts.model

    def loss(*batch: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(recipe, device):
            return objective.loss(model, *batch)

    return loss
