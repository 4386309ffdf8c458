"""A topology at work: masks on a model, kept by the hooks of its optimizer."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.storage.layer import Layer
from equipoise.storage.masked import MaskedLayer
from equipoise.topology.algorithm import Algorithm, Dynamic
from equipoise.topology.attach_checks import check_attaching, check_state
from equipoise.topology.initial import plan_layers
from equipoise.topology.packing import packed_weights
from equipoise.topology.selection import unwrap
from equipoise.world import World

OWNERS = WeakIdKeyDictionary()  # sparse weight -> weak reference to its topology


class Follower(Protocol):
    """Whoever keeps one number per weight beside the optimizer, such as a weight average."""

    def value_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The tensor shaped like a parameter that goes with it; None where it is no parameter of this model."""
        ...


# All of them, and not in a topology: a follower may be made before there is one
FOLLOWERS: weakref.WeakSet[Follower] = weakref.WeakSet()


class Topology:
    """Which weights of one model exist, from the first step to the last.

    Made by `Algorithm.attach`. Weights stay plain parameters with unchanged `state_dict` keys. Three kinds of hooks
    do the work and nothing is patched: after a backward pass the gradient of inactive weights is zeroed (so
    clipping, momentum and every optimizer see the sparse gradient), before an optimizer step a dense gradient that
    the algorithm asked for is put aside, and after the step inactive weights are set to exactly zero and, where the
    schedule says so, some are dropped and others grown.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        total_steps: int | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.window = algorithm.window(total_steps)
        self.steps = 0
        self.updates = 0
        self.world = World.of(model)  # the processes that train the model together
        self.layers = _make_layers(algorithm, unwrap(model))
        self._skipped: list[tuple[nn.Parameter, Tensor]] = []
        self._handles: list[Any] = []
        self._passes = 0  # backward passes of the step so far, where a packed layer must know
        self._one_pass = False  # whether the step before is known to have had one
        check_attaching(self, OWNERS)
        self._first_apply()
        self._install()

    # What a user asks for

    def join(self, world: World) -> None:
        """From now on the model is trained by these processes together."""
        self.world = world
        self._watch()

    @staticmethod
    def of(model: nn.Module) -> Topology | None:
        """The topology that is attached to a model."""
        return next((OWNERS[p]() for p in model.parameters() if p in OWNERS), None)

    @property
    def masks(self) -> dict[str, Tensor]:
        """The active places of every sparse weight, by parameter name."""
        return {layer.name: layer.mask() for layer in self.layers}

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def active(self) -> int:
        return sum(layer.active for layer in self.layers)

    @property
    def density(self) -> float:
        """Share of the chosen weights that is active."""
        return self.active / self.size if self.layers else 1.0

    @property
    def exploration(self) -> float:
        """ITOP's R_s: the share of the chosen weights that has been active at some time."""
        return sum(layer.explored() for layer in self.layers) / self.size if self.layers else 1.0

    @property
    def update_is_next(self) -> bool:
        """Whether the coming optimizer step is an update step."""
        return self.window is not None and self.window.contains(self.steps + 1)

    @property
    def storage(self) -> str:
        """`packed` where the weights are vectors of active values, else `masked`."""
        return "packed" if any(layer.index is not None for layer in self.layers) else "masked"

    @property
    def attached(self) -> bool:
        """Whether its hooks are on the model and the optimizer."""
        return bool(self._handles)

    def __repr__(self) -> str:
        kind = f"{type(self.algorithm).__name__}, {self.storage}"
        share = f"{self.active:,} of {self.size:,} weights active ({self.density:.2%})"
        return f"<{kind}: {share}, step {self.steps}, {self.updates} updates>"

    @torch.no_grad()
    def apply(self) -> None:
        """Set all inactive weights to exactly zero."""
        for layer in self.layers:
            layer.hide_inactive(layer.parameter)

    @torch.no_grad()
    def project(self, tensors: dict[str, Tensor]) -> None:
        """Set the inactive places of tensors that are named and shaped like the weights (an average, say) to zero."""
        for layer in self.layers:
            if layer.name in tensors:
                layer.hide_inactive(tensors[layer.name])

    @torch.no_grad()
    def hide_gradients(self) -> None:
        """Leave the gradient of active weights in `.grad` and put aside the dense one that the algorithm asked for.

        The optimizer's step does this in any case. Call it before clipping (under AMP after `unscale_`), so that
        the norm is that of the active weights also where the algorithm wants all: RigL at updates, SNFS always.
        """
        if self._wants_dense_gradient:
            for layer in self.layers:
                layer.keep_dense_gradient()

    def see_gradients(self) -> None:
        """What happens after a backward pass, for gradients that came into `.grad` in another way."""
        for layer in self.layers:
            self._after_backward(layer, layer.parameter)

    @contextmanager
    def keeping_batch_gradient(self) -> Iterator[None]:
        """Around a backward pass to whose gradient something will be added that growth shall not see.

        Nothing is put aside at steps that need no dense gradient, nor where growth is by the corrected gradient.
        """
        layers = self.layers if self._wants_dense_gradient and not self.grows_by_corrected else []
        earlier = [None if layer.parameter.grad is None else layer.parameter.grad.clone() for layer in layers]
        yield
        for layer, gradient in zip(layers, earlier, strict=True):
            layer.keep_batch_gradient(gradient)

    def put_aside(self) -> list[Tensor]:
        """Gradients beside `.grad` that must be averaged over the processes before the coming step."""
        return [tensor for layer in self.layers for tensor in layer.put_aside()] if self._wants_dense_gradient else []

    def check_equal(self) -> None:
        """Stop where the processes have come to different masks: what they average would not belong together."""
        if self.world.alone:
            return
        first, *others = self.world.all_gather_object([layer.digest() for layer in self.layers])
        for rank, digests in enumerate(others, 1):
            for layer, here, there in zip(self.layers, first, digests, strict=True):
                if here != there:
                    raise UserError(
                        f'after update {self.updates} processes 0 and {rank} have different masks of "{layer.name}": '
                        "they run different code, or one of them computes wrongly; go on from the last checkpoint"
                    )

    @property
    def grows_by_corrected(self) -> bool:
        """Whether growth wants the corrected gradient of inactive places."""
        return getattr(self.algorithm, "growth", "batch") == "corrected"

    def detach(self) -> None:
        """Take the hooks off; the weights stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer in self.layers:
            OWNERS.pop(layer.parameter, None)
            layer.watch(0)

    # The hooks

    @property
    def _skips_steps(self) -> bool:
        return isinstance(self.algorithm, Dynamic) and self.algorithm.step_at_update == "skip"

    @property
    def _wants_dense_gradient(self) -> bool:
        wish = self.algorithm.dense_gradient
        return wish == "always" or (wish == "at updates" and self.update_is_next)

    @property
    def _loss_scale(self) -> Tensor | None:
        """What a GradScaler has told a fused optimizer for the time of its step, to divide the gradients by."""
        return getattr(self.optimizer, "grad_scale", None)

    def _install(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        for layer in self.layers:
            if layer.index is None:  # else there is nothing to hide, and a hook would keep the vector at one length
                hook = partial(self._after_backward, layer)
                self._handles.append(layer.parameter.register_post_accumulate_grad_hook(hook))
            OWNERS[layer.parameter] = weakref.ref(self)
        if self.storage == "packed" and (counted := self._dense_parameter()) is not None:
            # by a weak reference: the parameter alone shall not keep the topology alive
            hook = partial(_count_pass, weakref.ref(self))
            self._handles.append(counted.register_post_accumulate_grad_hook(hook))
        self._watch()

    def _dense_parameter(self) -> nn.Parameter | None:
        sparse = {id(layer.parameter) for layer in self.layers}
        all_ = (p for group in self.optimizer.param_groups for p in group["params"])
        return next((p for p in all_ if p.requires_grad and id(p) not in sparse), None)

    @torch.no_grad()
    def _first_apply(self) -> None:
        """`apply`, and what `MaskedLayer.lost` must know to find weights that should not have been set to zero."""
        masked = [layer for layer in self.layers if isinstance(layer, MaskedLayer)]
        before = [int(torch.count_nonzero(layer.parameter)) for layer in masked]
        self.apply()
        for layer, count in zip(masked, before, strict=True):
            layer.attached = count, layer.parameter._version
            for tensor in self.followed(layer.parameter):
                layer.hide_inactive(tensor)

    @torch.no_grad()
    def _after_backward(self, layer: Layer, parameter: Tensor) -> None:
        if self._wants_dense_gradient:
            layer.begin_pass()
        elif parameter.grad is not None:
            layer.hide_inactive(parameter.grad)

    def _before_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare the gradients: at once, or where the optimizer is given a closure, whenever it has made them."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._prepare_gradients()
            return None

        def prepared_closure() -> Any:
            loss = closure()
            self._prepare_gradients()
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], prepared_closure, *args[2:]), others

    @torch.no_grad()
    def _prepare_gradients(self) -> None:
        self.hide_gradients()
        if self.algorithm.dense_gradient == "always":
            for layer in self.layers:
                layer.loss_scale = self._loss_scale
                self.algorithm.observe(layer)
        if self.update_is_next and self._skips_steps:
            # Every optimizer leaves a parameter without gradient alone, its momentum and decay included.
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._skipped = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for parameter, gradient in self._skipped:
            scale = self._loss_scale
            parameter.grad = gradient if scale is None else gradient.div_(scale.to(gradient))  # as a step would
        self._skipped = []
        self.apply()
        before = self.updates
        self.algorithm.after_step(self)
        if self.update_is_next:
            self._update()
        if self.updates > before:
            self._restart_lbfgs()
        self._give_newborn_a_step()
        self.steps += 1
        self._one_pass, self._passes = self._passes == 1, 0
        for layer in self.layers:
            layer.forget_gradient()
        self._watch()

    def _update(self) -> None:
        assert isinstance(self.algorithm, Dynamic)
        assert self.window is not None
        self.updates += 1
        for layer in self.layers:
            if not layer.parameter.requires_grad:
                continue  # frozen since
            generator = torch.Generator(layer.parameter.device)
            generator.manual_seed(derive(self.algorithm.seed, "growth", self.updates, layer.name))
            choice = self.algorithm.choose(layer, self.window, self.steps + 1, generator)
            if choice is not None:
                layer.rewire(*choice, self.states(layer.parameter))
        self.check_equal()

    def _restart_lbfgs(self) -> None:
        """It has steps and curvature of the old topology, all weights in one vector, and counts these only once."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.state.clear()
            self.optimizer._numel_cache = None

    def _give_newborn_a_step(self) -> None:
        """Rprop multiplies each weight's own step size: from zero, as growth leaves it, it would never come."""
        if not isinstance(self.optimizer, torch.optim.Rprop):
            return
        sparse = {id(layer.parameter) for layer in self.layers}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                size = self.optimizer.state.get(parameter, {}).get("step_size") if id(parameter) in sparse else None
                if size is not None:
                    size.masked_fill_(size == 0, float(group["lr"]))

    def states(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """What changes with a parameter's places: the optimizer's tensors that hold one number per weight (momentum,
        Adam's moments, whatever it keeps) and those of whoever follows it."""
        for value in self.optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                yield value
        yield from self.followed(parameter)

    @staticmethod
    def followed(parameter: nn.Parameter) -> Iterator[Tensor]:
        """What followers keep for a parameter."""
        for follower in FOLLOWERS:
            if (value := follower.value_of(parameter)) is not None:
                yield value

    def _watch(self) -> None:
        """Tell the layers which gradients of inactive places the coming step is asked for."""
        for layer in self.layers:
            layer.watch(self._wanted(layer))

    def _wanted(self, layer: Layer) -> int | None:
        if not self._wants_dense_gradient:
            return 0
        if self.algorithm.dense_gradient == "always" or self.window is None:
            return None
        if not self.world.alone:
            return None  # the largest of the mean are not known before there is one
        assert isinstance(self.algorithm, Dynamic)
        if not self.algorithm.needs_largest_only():
            return None
        if not self._one_pass:
            return None  # nor are the largest of the sum over several backward passes
        return self.algorithm.most_grown(layer, self.window, self.steps + 1)

    # Save, load, copy

    def state_dict(self) -> dict[str, Any]:
        return {
            "algorithm": type(self.algorithm).__name__,
            "steps": self.steps,
            "updates": self.updates,
            "places": {layer.name: layer.saved() for layer in self.layers},
            "memory": {layer.name: layer.memory for layer in self.layers if layer.memory is not None},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the masks and counters of a saved topology; a wrong state is refused and changes nothing.

        To resume, attach first, as in the run that was saved, and then load the model, the optimizer and this:
        attaching sets the weights outside the very first mask to zero.
        """
        check_state(self, state)
        if sum(layer.lost(state["places"][layer.name]) for layer in self.layers):
            warnings.warn(
                "weights were set to zero when the topology was attached that its state calls active; "
                "load the model after attaching",
                stacklevel=3,
            )
        self.steps, self.updates = state["steps"], state["updates"]
        for layer in self.layers:
            layer.load(state["places"][layer.name], state["memory"].get(layer.name))
            layer.forget_gradient()  # of a step that was not finished
        self._watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        """A copy that works on the copied model and optimizer when the three are copied together.

        Optimizers and parameters drop their hooks when copied, so the copy installs its own.
        """
        new = object.__new__(type(self))
        memo[id(self)] = new
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_handles", "_skipped")}
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in kept.items()}, _skipped=[], _handles=[])
        if self.attached:
            new._install()
        return new


def _count_pass(owner: weakref.ref[Topology], _: Tensor) -> None:
    if (topology := owner()) is not None:
        topology._passes += 1


def _make_layers(algorithm: Algorithm, model: nn.Module) -> list[Layer]:
    if packed := packed_weights(algorithm, model):
        return packed
    layers: list[Layer] = []
    for planned in plan_layers(algorithm, model):
        layers.append(MaskedLayer(planned.name, planned.weight, planned.active, planned.final))
        algorithm.prepare(layers[-1])
    return layers
