"""The topology of a model: its masks, applied at every step of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import Compile, MaskedWeight
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm, Dynamic
from equipoise.topology.attach_checks import (
    PrunedLayers,
    check_arguments,
    check_attaching,
    check_current,
    warn_without_updates,
)
from equipoise.topology.followers import Follower, Followers
from equipoise.topology.growth import GrowthGradients
from equipoise.topology.hooks import Hooks
from equipoise.topology.hydra import Hydra, LearnedScores
from equipoise.topology.latent import Latent
from equipoise.topology.optimizer_state import SkippedStep, loss_scale, restart_lbfgs, start_rprop
from equipoise.topology.rewiring import make_rewiring
from equipoise.topology.selection import unwrap
from equipoise.topology.sparse_weights import owner_of, sharded, sparse_weights
from equipoise.topology.srste import SRSTE, LatentWeights
from equipoise.topology.topology_state import check_state, load_state, state_of, verify_checksums
from equipoise.world import World

# Sparse weight -> weak reference to its topology: a second topology on the same weight is refused.
_OWNERS = WeakIdKeyDictionary()


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
        flat: The layout of the parameters if the optimizer steps stretches of one vector.
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
        check_arguments(algorithm, model, optimizer)
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.window = algorithm.window(total_steps)
        self.steps = 0
        self.updates = 0
        self.model = unwrap(model)
        self.world = World.of(model) if world is None else world
        self.layers = sparse_weights(algorithm, self.model, flat, compile)
        self.owners = [owner_of(self.model, layer) for layer in self.layers]
        masked = {id(la.masked): la.masked for la in self.layers if isinstance(la, MaskedWeight) and la.masked.shared}
        self._vectors = list(masked.values())  # tensors of several weights that are masked at once
        self._skipped = SkippedStep()
        self._followers = Followers()
        self.growth = GrowthGradients(algorithm, self.layers, self.world)
        self._hooks: Hooks | None = None
        check_attaching(self, model, _OWNERS)
        if hooks:  # without them, the loop warns when it begins to train
            warn_without_updates(self, stacklevel=3)  # the caller of attach()
        self._unverified: dict[str, int] = {}  # checksums of a loaded state, until the next step
        self.rewiring = make_rewiring(algorithm, self.layers, self.states, self._followers, flat, compile)
        self._latent = self._make_latent()
        self.pruned = PrunedLayers(self.model, self.layers)
        self._install(hooks)

    def _install(self, hooks: bool) -> None:
        self.apply()
        for layer in self.layers:
            _OWNERS[layer.parameter] = weakref.ref(self)
        self._begin_step()
        if hooks:
            self._hooks = Hooks(self)

    def _make_latent(self) -> Latent | None:
        if isinstance(self.algorithm, SRSTE) and self.layers:
            return LatentWeights(self.algorithm, self.layers)
        if isinstance(self.algorithm, Hydra) and self.layers:
            return LearnedScores(self.layers, self.optimizer)
        return None

    # Properties

    @staticmethod
    def of(model: nn.Module) -> Topology | None:
        """The topology that is attached to a model; `None` if there is none."""
        return next(_owners(model), None)

    @staticmethod
    def only(model: nn.Module, topology: Topology | None = None) -> Topology | None:
        """The one topology of a model, for work that cannot follow several.

        Args:
            model: The model.
            topology: The topology if it is known; by default the one that is attached.

        Raises:
            UserError: Another topology is attached to weights of the model.
        """
        found = Topology.of(model) if topology is None else topology
        for other in _owners(model):
            if other is not found:
                raise UserError(
                    f'"{other.layers[0].name}" belongs to another topology of the model; averages, corrections and '
                    "measurements follow one topology: attach one to all weights, with one optimizer"
                )
        return found

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean mask of every sparse weight, by parameter name."""
        check_current(self)
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
            for tensor in self._followers.of(layer.stepped):
                layer.hide_inactive(layer.view(tensor))

    def detach(self) -> None:
        """Remove the hooks; the weights stay as they are."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        for layer in self.layers:
            _OWNERS.pop(layer.parameter, None)
        self.growth.stop()

    def reattach(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue on a model that `torch.distributed.fsdp.fully_shard` has sharded since the topology was attached.

        `fully_shard` replaces the parameters of a model, so that it needs a new optimizer, and this call. Masks,
        counters and memory are kept.

        Args:
            optimizer: The optimizer of the sharded parameters.
        """
        pairs = zip(self.layers, self.owners, strict=True)
        layers = [sharded(layer, module._parameters[leaf]) for layer, (module, leaf) in pairs]
        before = self.layers, self.optimizer
        try:
            self.layers, self.optimizer = layers, optimizer
            check_attaching(self, self.model, _OWNERS)
        finally:
            self.layers, self.optimizer = before
        self.detach()
        self.layers, self.optimizer = layers, optimizer
        self.world = World.of(self.model)
        self.growth = GrowthGradients(self.algorithm, layers, self.world)
        self._install(hooks=True)

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
        self.growth.take()
        for masked in self._vectors:
            if masked.tensor.grad is not None:
                masked.hide_inactive(masked.tensor.grad)

    @torch.no_grad()
    def before_step(self) -> None:
        """Prepare the gradients of a step, after its last backward pass."""
        if self.attached:
            check_current(self)
            verify_checksums(self, self._unverified)
            self._unverified = {}
            self.growth.all_reduce()
        if self.algorithm.dense_gradient == "always":
            scale = loss_scale(self.optimizer)
            if scale is None and self.attached:
                scale = self.growth.scale()
            for layer in self.layers:
                self.algorithm.observe(layer, scale)
        if self._latent is not None and self._projects_next:
            self._latent.lift(self.growth.scale() if self.attached else None, loss_scale(self.optimizer))
        if self.update_is_next and isinstance(self.algorithm, Dynamic) and self.algorithm.step_at_update == "skip":
            self._skipped.begin(self.optimizer)

    @torch.no_grad()
    def after_step(self) -> None:
        """Mask the weights after an optimizer step and, at update steps, drop and grow weights.

        Between update steps this never waits for a device and changes no counter: a CUDA graph can replay it.
        """
        self._skipped.end(self.optimizer)
        if self.rewiring is not None:
            self.rewiring.after_step(self.steps, self.optimizer.param_groups[0]["lr"])
        elif self._latent is not None and self._projects_next:
            self._latent.project()
        elif self.attached:
            # A loop without hooks masks the gradients and changes weights only by its steps: inactive ones stay zero.
            self.apply()
        if self.update_is_next and self._latent is None:
            self._update()
        start_rprop(self.optimizer, self.layers)

    def count_step(self) -> None:
        """Count a step, and prepare the next one."""
        if self.rewires_next and self.rewiring is not None:
            self.rewiring.recount()
        projected = self._projects_next
        if self.rewires_next or self.update_is_next or projected:
            self.updates += 1
            restart_lbfgs(self.optimizer)
        self.steps += 1
        if self._latent is not None and projected and not self._projects_next:
            self._latent.finish()
        self._begin_step()

    def _begin_step(self) -> None:
        self.growth.begin_step(self.update_is_next)
        if self.rewiring is not None:
            self.rewiring.seed(self.steps)

    @property
    def _projects_next(self) -> bool:
        """Whether the next step is one of latent weights or scores: every step of SR-STE, a phase of HYDRA."""
        return self._latent is not None and (self.window is None or self.update_is_next)

    @property
    def rewires_next(self) -> bool:
        """Whether BSR-Net rewires after the next step."""
        return self.rewiring is not None and self.rewiring.rewires(self.steps)

    @property
    def changes_every_step(self) -> bool:
        """Whether the masks may change at every step on the device: BSR-Net, SR-STE and HYDRA."""
        return self.rewiring is not None or self._latent is not None

    def activity_of(self, stepped: Tensor) -> Tensor | None:
        """The mask of a tensor that the optimizer steps if it changes at every step; `None` if it does not."""
        if not self.changes_every_step:
            return None
        masked = (layer.masked for layer in self.layers if isinstance(layer, MaskedWeight))
        return next((each.activity for each in masked if each.tensor is stepped), None)

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
        followers = [layer.view(tensor) for tensor in self._followers.of(layer.stepped)]
        return [*layer.states(self.optimizer), *followers]

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
        """Masks, exploration and counters, and checksums of the weights that belong to them.

        If the weights are sharded, all processes call this together and get the same state of whole weights, which
        loads on any number of processes.
        """
        check_current(self)
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the masks and counters of a saved topology. A wrong state is refused and changes nothing.

        To resume, attach first, as in the run that was saved, and then load the model, the optimizer and the
        topology, in any order. The next step of the optimizer raises an error if the weights are not those of the
        saved model.
        """
        check_state(self, state)
        load_state(self, state)
        self._unverified = dict(state.get("checksums", {}))
        self._begin_step()

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key != "_hooks"}
        return {**kept, "attached": self.attached, "recorded": [layer.growth for layer in self.layers]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy that works on the copied model and optimizer if the three are copied or pickled together.

        Optimizers and parameters lose their hooks when copied, so the copy installs its own.
        """
        attached, recorded = state.pop("attached"), state.pop("recorded")
        self.__dict__.update(state)
        self._hooks = None
        self._begin_step()  # generators, and the probes of packed layers, are not copied
        if attached:
            for layer, growth in zip(self.layers, recorded, strict=True):
                _OWNERS[layer.parameter] = weakref.ref(self)
                if growth is not None:
                    layer.growth = growth
            self._hooks = Hooks(self)

    def __copy__(self) -> Topology:
        raise UserError(
            "two topologies cannot have the same weights; use copy.deepcopy((model, optimizer, topology))"
        )


def _owners(model: nn.Module) -> Iterator[Topology]:
    """The topologies of the weights of a model."""
    found = (_OWNERS[p]() for p in model.parameters() if p in _OWNERS)
    return (topology for topology in found if topology is not None)
