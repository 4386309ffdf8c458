"""Hooks that keep a topology in step with any training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.storage.masked import MaskedWeight
from equipoise.topology.optimizer_state import is_dry, overflowed

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology


class Hooks:
    """Calls a topology after backward passes, before and after optimizer steps. Nothing is patched.

    A step that a GradScaler skips is not counted. It calls a fused optimizer nevertheless, which then changes nothing.
    Neither is the step with which torch.distributed.checkpoint creates the state of an optimizer.

    Args:
        topology: The topology; its optimizer and its weights get the hooks.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._dry = False
        optimizer = topology.optimizer
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        for layer in topology.layers:
            if isinstance(layer, MaskedWeight):  # packed storage has no gradient of inactive weights to hide
                hook = partial(after_backward, layer)
                self._handles.append(layer.parameter.register_post_accumulate_grad_hook(hook))
                if topology.algorithm.dense_gradient != "never":
                    before = layer.growth_recorder.before_accumulation
                    self._handles.append(layer.parameter.register_hook(before))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare the gradients, or wrap the closure so that each of its calls ends with this preparation."""
        self._dry = is_dry(self._topology.optimizer, self._topology.world)
        if self._dry or overflowed(self._topology.optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._topology.before_step()
            return None
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], partial(self._closure, closure), *args[2:]), others

    def _closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._topology.before_step()
        return loss

    def _after_step(self, *_: Any) -> None:
        topology = self._topology
        if self._dry or overflowed(topology.optimizer):
            return
        topology.after_step()
        topology.count_step()
        topology.pruned.warn(stacklevel=3)  # the caller of optimizer.step()
        if topology.window is not None and topology.steps == topology.window.total + 1:
            warnings.warn(
                f"step {topology.steps} is past total_steps={topology.window.total}, and the topology no longer "
                "changes; attach with the number of steps of the whole training",
                stacklevel=3,
            )


@torch.no_grad()
def after_backward(layer: MaskedWeight, parameter: Tensor) -> None:
    """Keep the gradient of inactive weights if it is recorded, and clear it in `.grad`."""
    layer.growth_recorder.after_accumulation()
    if parameter.grad is not None:
        layer.hide_inactive(parameter.grad)
