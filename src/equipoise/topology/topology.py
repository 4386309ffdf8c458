"""The topology of a model: its masks, applied at every step of its optimizer."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import Compile, MaskedTensor, MaskedWeight
from equipoise.storage.packed import PackedWeight
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm, Dynamic
from equipoise.topology.attach_checks import check_attaching, check_state
from equipoise.topology.bsr import BSRNet
from equipoise.topology.hooks import Hooks
from equipoise.topology.initial import plan_layers
from equipoise.topology.optimizer_state import restart_lbfgs, start_rprop
from equipoise.topology.packing import packed_weights
from equipoise.topology.rewiring import MaskedRewiring, PackedRewiring, Rewiring
from equipoise.topology.selection import unwrap
from equipoise.world import World

# Sparse weight -> weak reference to its topology: a second topology on the same weight is refused.
_OWNERS = WeakIdKeyDictionary()


class Follower(Protocol):
    """Keeps one number for each weight outside the optimizer, such as a weight average."""

    def tensor_of(self, stepped: nn.Parameter) -> Tensor | None:
        """The tensor that follows `stepped`, which the optimizer steps; `None` if there is none."""
        ...


class Topology:
    """The set of active weights of one model, from the first step to the last.

    Made by `Algorithm.attach`. Weights stay plain parameters with unchanged `state_dict` keys. After a backward pass
    the gradient of inactive weights is zero, so that clipping, momentum and every optimizer see the sparse gradient.
    After an optimizer step inactive weights are exactly zero and, at update steps, some weights are dropped and others
    grown. Hooks on the weights and on the optimizer do this; nothing is patched.

    Args:
        algorithm: Chooses the weights.
        model: The model.
        optimizer: Its optimizer.
        total_steps: Number of optimizer steps of the whole training.
        flat: The layout of the parameters if the optimizer steps `flat.stretches`.
        world: The processes that train the model together; found from the model by default.
        compile: Applied to functions that run on the device at every step.
        hooks: Whether to install hooks. Without them, the loop calls `take_gradients`, `before_step`, `after_step` and
            `count_step` itself, and averages the recorded growth over the processes.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        total_steps: int | None = None,
        *,
        flat: FlatParameters | None = None,
        world: World | None = None,
        compile: Compile = lambda function: function,
        hooks: bool = True,
    ) -> None:
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.window = algorithm.window(total_steps)
        self.steps = 0
        self.updates = 0
        self.world = World.of(model) if world is None else world
        self.layers = _sparse_weights(algorithm, unwrap(model), flat, compile)
        masked = {id(la.masked): la.masked for la in self.layers if isinstance(la, MaskedWeight) and la.masked.shared}
        self._vectors = list(masked.values())  # tensors of several weights that are masked at once
        self._skipped: list[tuple[nn.Parameter, Tensor]] = []
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._hooks: Hooks | None = None
        check_attaching(self, model, _OWNERS)
        self._nonzeros = {layer.name: int(torch.count_nonzero(layer.parameter)) for layer in self.layers}
        self._rewiring = self._make_rewiring(flat, compile)
        self.apply()
        for layer in self.layers:
            _OWNERS[layer.parameter] = weakref.ref(self)
        self._record_growth()
        self.seed()
        if hooks:
            self._hooks = Hooks(self)

    def _make_rewiring(self, flat: FlatParameters | None, compile: Compile) -> Rewiring | None:
        if not isinstance(self.algorithm, BSRNet) or not self.layers:
            return None
        packed = [layer for layer in self.layers if isinstance(layer, PackedWeight)]
        if packed:
            return PackedRewiring(packed, self.algorithm.noise, self.states)
        masked = [layer for layer in self.layers if isinstance(layer, MaskedWeight)]
        return MaskedRewiring(masked, self.algorithm.noise, self._following, flat, compile)

    # Properties

    @staticmethod
    def of(model: nn.Module) -> Topology | None:
        """The topology that is attached to a model; `None` if there is none."""
        return next((_OWNERS[p]() for p in model.parameters() if p in _OWNERS), None)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean mask of every sparse weight, by parameter name."""
        return {layer.name: layer.mask() for layer in self.layers}

    @property
    def size(self) -> int:
        """Number of weights of the sparse layers, active or not."""
        return sum(layer.size for layer in self.layers)

    @property
    def active(self) -> int:
        """Number of active weights of the sparse layers."""
        return sum(layer.active for layer in self.layers)

    @property
    def density(self) -> float:
        """Fraction of the weights of the sparse layers that is active."""
        return self.active / self.size if self.layers else 1.0

    @property
    def exploration(self) -> float:
        """Fraction of the weights that has been active at some time (ITOP's R_s, Liu et al. 2021)."""
        return sum(layer.explored() for layer in self.layers) / self.size if self.layers else 1.0

    @property
    def update_is_next(self) -> bool:
        """Whether the next optimizer step is an update step."""
        return self.window is not None and self.window.contains(self.steps + 1)

    @property
    def storage(self) -> str:
        """`packed` if the weights are vectors of active values, else `masked`."""
        return "packed" if any(layer.index is not None for layer in self.layers) else "masked"

    @property
    def attached(self) -> bool:
        """Whether the hooks of the topology are installed."""
        return self._hooks is not None

    def __repr__(self) -> str:
        kind = f"{type(self.algorithm).__name__}, {self.storage}"
        count = f"{self.active:,} of {self.size:,} weights active ({self.density:.2%})"
        return f"<{kind}: {count}, step {self.steps}, {self.updates} updates>"

    @torch.no_grad()
    def project(self, tensors: dict[str, Tensor]) -> None:
        """Set the inactive entries of tensors that are named and shaped like the weights to zero."""
        for layer in self.layers:
            if layer.name in tensors:
                layer.hide_inactive(tensors[layer.name])

    def follow(self, follower: Follower) -> None:
        """Change the tensors of a follower together with the weights: dropped and grown entries become zero."""
        self._followers.add(follower)
        for layer in self.layers:
            for tensor in self._following(layer.stepped):
                layer.hide_inactive(layer.view(tensor))

    def detach(self) -> None:
        """Remove the hooks; the weights stay as they are."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        for layer in self.layers:
            _OWNERS.pop(layer.parameter, None)
            layer.record_growth(False)

    # One step: take_gradients after the backward passes, before_step, optimizer.step(), after_step, count_step

    @torch.no_grad()
    def apply(self) -> None:
        """Set all inactive weights to exactly zero."""
        for masked in self._vectors:
            masked.hide_inactive(masked.tensor)
        for layer in self.layers:
            if layer.stepped is layer.parameter:
                layer.hide_inactive(layer.parameter)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Record the gradients of inactive weights if the step needs them, and set them to zero in `.grad`.

        For loops without hooks, which compute all gradients of a step at once.
        """
        for layer in self.layers:
            if isinstance(layer, MaskedWeight) and self.records_growth and layer.stepped.grad is not None:
                layer.growth_recorder.add(layer.view(layer.stepped.grad), restart=True)
        for masked in self._vectors:
            if masked.tensor.grad is not None:
                masked.hide_inactive(masked.tensor.grad)

    @torch.no_grad()
    def before_step(self) -> None:
        """Prepare the gradients of a step, after its last backward pass."""
        if self.attached and (recorded := self.recorded_growth()):
            self.set_growth(self.world.all_reduce_mean(recorded))
        if self.algorithm.dense_gradient == "always":
            for layer in self.layers:
                self.algorithm.observe(layer, self._loss_scale)
        if self.update_is_next and self._skips_steps:
            # Every optimizer leaves a parameter without gradient alone, its momentum and decay included.
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._skipped = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        """Mask the weights after an optimizer step and, at update steps, drop and grow weights.

        Between update steps this never waits for a device and changes no counter: a CUDA graph can replay it.
        """
        for parameter, gradient in self._skipped:
            scale = self._loss_scale  # the step would have divided by it
            parameter.grad = gradient if scale is None else gradient.div_(scale.to(gradient))
        self._skipped = []
        if self._rewiring is None and self._hooks is not None:
            # A loop without hooks masks the gradients and changes weights only by its steps: inactive ones stay zero.
            self.apply()
        if self._rewiring is not None:
            self._rewiring.cross(self.optimizer.param_groups[0]["lr"], self.rewires_next)
            if self.rewires_next:
                self._rewiring.refill()
        if self.update_is_next:
            self._update()
        start_rprop(self.optimizer, self.layers)

    def count_step(self) -> None:
        """Count a step, and prepare the next one."""
        rewired = self.rewires_next
        if rewired:
            for layer in self.layers:
                if isinstance(layer, MaskedWeight):
                    layer.recount()
        if rewired or self.update_is_next:
            self.updates += 1
            restart_lbfgs(self.optimizer)
        self.steps += 1
        self._record_growth()
        self.seed()

    def seed(self) -> None:
        """Seed the random numbers of the next step's rewiring."""
        if self._rewiring is not None:
            self._rewiring.generator.manual_seed(derive(self.algorithm.seed, "rewire", self.steps))

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that `after_step` draws from between update steps."""
        return [] if self._rewiring is None else [self._rewiring.generator]

    def activity_of(self, stepped: nn.Parameter) -> Tensor | None:
        """The mask of a tensor that the optimizer steps, if it changes on the device after every step."""
        if not isinstance(self._rewiring, MaskedRewiring):
            return None
        masked = (layer.masked for layer in self.layers if isinstance(layer, MaskedWeight))
        return next((each.activity for each in masked if each.tensor is stepped), None)

    @property
    def rewires_next(self) -> bool:
        """Whether BSR-Net rewires after the next step."""
        every = self.algorithm.rewire_every if isinstance(self.algorithm, BSRNet) else 0
        return self._rewiring is not None and (self.steps + 1) % every == 0

    @property
    def records_growth(self) -> bool:
        """Whether the next step needs the gradient of inactive weights."""
        needed = self.algorithm.dense_gradient
        return needed == "always" or (needed == "at updates" and self.update_is_next)

    @property
    def grows_by_corrected(self) -> bool:
        """Whether growth uses the corrected gradient of inactive weights."""
        return getattr(self.algorithm, "growth", "batch") == "corrected"

    @torch.no_grad()
    def add_to_growth(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        """Add a correction of all weights to the recorded gradients, for growth by the corrected gradient."""
        parts = {id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)}
        for layer in self.layers:
            if layer.growth is not None and id(layer.parameter) in parts:
                layer.growth = layer.growth + parts[id(layer.parameter)]

    def _record_growth(self) -> None:
        for layer in self.layers:
            layer.record_growth(self.records_growth)

    def recorded_growth(self) -> list[Tensor]:
        """The gradients that this process has recorded, and a vector that says which of them exist, to be averaged.

        The list is empty in a single process and if the next step needs no gradients.
        """
        if self.world.alone or not self.records_growth:
            return []
        found = [torch.zeros(layer.mask().shape) if layer.growth is None else layer.growth for layer in self.layers]
        found = [tensor.to(layer.parameter) for tensor, layer in zip(found, self.layers, strict=True)]
        known = found[0].new_tensor([float(layer.growth is not None) for layer in self.layers])
        return [*found, known]

    def set_growth(self, means: Sequence[Tensor]) -> None:
        """Replace the recorded gradients by the means of `recorded_growth` over the processes."""
        *growth, fractions = means
        for layer, mean, fraction in zip(self.layers, growth, fractions.tolist(), strict=True):
            if fraction > 0:
                layer.growth = mean

    @property
    def _skips_steps(self) -> bool:
        return isinstance(self.algorithm, Dynamic) and self.algorithm.step_at_update == "skip"

    @property
    def _loss_scale(self) -> Tensor | None:
        """The loss scale that a GradScaler has given to a fused optimizer for the duration of its step."""
        return getattr(self.optimizer, "grad_scale", None)

    def _update(self) -> None:
        assert isinstance(self.algorithm, Dynamic)
        assert self.window is not None
        for layer in self.layers:
            if not layer.parameter.requires_grad:
                continue  # frozen after attaching
            generator = torch.Generator(layer.parameter.device)
            generator.manual_seed(derive(self.algorithm.seed, "growth", self.updates + 1, layer.name))
            choice = self.algorithm.choose(layer, self.window, self.steps + 1, generator)
            if choice is not None:
                layer.rewire(*choice, self.states(layer))
        self.check_equal()

    def states(self, layer: SparseWeight) -> list[Tensor]:
        """Tensors that change together with a weight: optimizer state (momentum, moments, ...) and followers."""
        followers = [layer.view(tensor) for tensor in self._following(layer.stepped)]
        return [*layer.states(self.optimizer), *followers]

    def _following(self, stepped: nn.Parameter) -> list[Tensor]:
        found = [follower.tensor_of(stepped) for follower in self._followers]
        return [tensor for tensor in found if tensor is not None]

    def check_equal(self) -> None:
        """Raise an error if the processes have different masks: the mean of their gradients would be meaningless."""
        if self.world.alone:
            return
        first, *others = self.world.all_gather_object([layer.digest() for layer in self.layers])
        for rank, digests in enumerate(others, 1):
            for layer, here, there in zip(self.layers, first, digests, strict=True):
                if here != there:
                    raise UserError(
                        f'processes 0 and {rank} have different masks of "{layer.name}" after update {self.updates}: '
                        "they run different code or one of them computed a wrong value; resume from the last checkpoint"
                    )

    # Save, load, copy

    def state_dict(self) -> dict[str, Any]:
        """Masks, exploration and counters."""
        return {
            "algorithm": type(self.algorithm).__name__,
            "steps": self.steps,
            "updates": self.updates,
            "layers": {layer.name: layer.state_dict() for layer in self.layers},
            "memory": {layer.name: layer.memory for layer in self.layers if layer.memory is not None},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the masks and counters of a saved topology. A wrong state is refused and changes nothing.

        To resume, attach first, as in the run that was saved, and then load the model, the optimizer and the
        topology: attaching sets the weights outside the initial mask to zero.
        """
        counts = check_state(self, state)
        self.steps, self.updates = state["steps"], state["updates"]
        lost = False
        for layer in self.layers:
            before = int(torch.count_nonzero(layer.parameter))
            layer.load_state_dict(state["layers"][layer.name])
            self._load_memory(layer, state["memory"].get(layer.name))
            lost |= isinstance(layer, MaskedWeight) and before < self._nonzeros[layer.name] <= counts[layer.name]
        if lost:
            warnings.warn(
                "attaching set weights to zero that are active in the loaded state; load the model after attaching",
                stacklevel=3,
            )
        self._record_growth()
        self.seed()

    def _load_memory(self, layer: SparseWeight, memory: Tensor | None) -> None:
        if layer.memory is not None and memory is not None and self._rewiring is not None:
            layer.memory.copy_(memory)  # a view of the signs of all weights
        else:
            layer.memory = None if memory is None else memory.to(layer.parameter.device, copy=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        """Return a copy that works on the copied model and optimizer if the three are copied together.

        Optimizers and parameters lose their hooks when copied, so the copy installs its own.
        """
        new = object.__new__(type(self))
        memo[id(self)] = new
        kept = {key: value for key, value in self.__dict__.items() if key not in ("_hooks", "_skipped", "_followers")}
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in kept.items()})
        new._skipped, new._followers, new._hooks = [], weakref.WeakSet(), None
        if self.attached:
            new._record_growth()  # a copied packed layer does not record by itself
            for layer, own in zip(self.layers, new.layers, strict=True):
                _OWNERS[own.parameter] = weakref.ref(new)
                if layer.growth is not None:
                    own.growth = layer.growth.clone()
            new._hooks = Hooks(new)
        new.seed()
        return new


def _sparse_weights(
    algorithm: Algorithm, model: nn.Module, flat: FlatParameters | None, compile: Compile
) -> list[SparseWeight]:
    if packed := packed_weights(algorithm, model):
        return packed
    stretches = [] if flat is None else flat.stretches
    vectors = {id(stretch): MaskedTensor(stretch, shared=True, compile=compile) for stretch in stretches}
    layers: list[SparseWeight] = []
    for planned in plan_layers(algorithm, model):
        masked = vectors[id(flat.stretch_of(planned.weight))] if flat is not None else None
        layers.append(MaskedWeight(planned.name, planned.weight, planned.active, planned.final, masked, flat))
    return layers
