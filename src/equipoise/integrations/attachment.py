"""The topology and the correction of a training that a framework runs, saves and resumes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.correction import Correction
from equipoise.correction.batches import Batches, LossFunction
from equipoise.correction.estimator import Estimator
from equipoise.errors import UserError
from equipoise.topology import Algorithm, Topology
from equipoise.topology.selection import unwrap
from equipoise.training.processes import correction_for_process, local_correction
from equipoise.world import World


class Attachment:
    """Base of the callbacks: attaches topology and correction, and keeps their state for the framework's checkpoint.

    Frameworks load the model before their callbacks can attach anything. A loaded state therefore waits until
    `attach`, which restores it together with the weights.

    Args:
        algorithm: The topology, such as `eq.RigL(sparsity=0.9)`.
        correction: The gradient correction, such as `eq.Agent()`; by default none.
        total_steps: Number of optimizer steps of the whole training; by default taken from the framework.

    Attributes:
        topology: The topology of the current or last training; `None` before the first.
        correction: The attached correction; `None` if there is none.
    """

    def __init__(
        self, algorithm: Algorithm, correction: Estimator | None = None, *, total_steps: int | None = None
    ) -> None:
        super().__init__()
        if correction is not None and correction.fixed_batches:
            raise UserError(
                f"{type(correction).__name__} needs the same batches in every epoch and their numbers; "
                "use it in your own loop, or another correction"
            )
        self.algorithm = algorithm
        self.estimator = correction
        self.total_steps = total_steps
        self.topology: Topology | None = None
        self.correction: Correction | None = None
        self._refreshed: int | None = None  # the epoch of the last refresh
        self._loaded: dict[str, Any] | None = None

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        total_steps: int | None,
        world: World,
        accumulated: int = 1,
    ) -> None:
        """Attach topology and correction, and restore their state if one was loaded.

        Args:
            model: The model, whose weights are loaded.
            optimizer: Its optimizer.
            total_steps: Number of optimizer steps that the framework plans.
            world: The processes that train the model together.
            accumulated: Number of batches of an optimizer step.
        """
        self.detach()
        loaded, self._loaded = self._loaded, None
        steps = self.total_steps or total_steps
        # Attaching sets weights to zero that the loaded masks may keep.
        weights = _copies(model, () if loaded is None else loaded["topology"]["layers"])
        self.topology = Topology(self.algorithm, model, optimizer, steps, world=world)
        if self.estimator is not None:
            backward_passes = None if steps is None else steps * accumulated
            self.correction = self.estimator.attach(model, self.topology, backward_passes, world=world)
        self._refreshed = None
        if loaded is not None:
            with torch.no_grad():
                for parameter, weight in weights:
                    parameter.copy_(weight)
            self._restore(loaded, world)

    def _restore(self, state: dict[str, Any], world: World) -> None:
        assert self.topology is not None
        self.topology.load_state_dict(state["topology"])
        if (self.correction is None) != (state["correction"] is None):
            saved, here = ("with", "without") if self.correction is None else ("without", "with")
            raise UserError(f"the checkpoint was saved {saved} a correction, and this training is {here} one")
        if self.correction is not None:
            self.correction.load_state_dict(correction_for_process(state["correction"], state["others"], world))
            self._refreshed = state["refreshed"]

    def detach(self) -> None:
        """Remove the hooks of the topology; weights, masks and numbers stay as they are."""
        if self.topology is not None:
            self.topology.detach()

    def before_batch(self, epoch: int, batches: Batches, loss_fn: LossFunction) -> None:
        """Prepare the correction for a batch: refresh it if that is due.

        Args:
            epoch: The epoch, counted from 0.
            batches: The batches of an epoch.
            loss_fn: Maps the model and a batch to its loss.
        """
        if self.correction is None:
            return
        every, since = self.correction.estimator.every, self.correction.steps_since_refresh
        if self._refreshed is None or (since >= every if every else epoch != self._refreshed):
            self.correction.refresh(batches, loss_fn, epoch)
            self._refreshed = epoch
        self.correction.before_forward()

    def metrics(self) -> dict[str, float]:
        """Density, exploration (ITOP's R_s) and the report of the correction since the last call."""
        if self.topology is None:
            return {}
        report = {} if self.correction is None else self.correction.report()
        numbers = {f"correction/{name}": float(value) for name, value in report.items()}
        return {"density": self.topology.density, "exploration": self.topology.exploration, **numbers}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the framework's checkpoint. All processes call it; the first one returns all of it."""
        if self.topology is None:
            return self._loaded or {}
        correction = None if self.correction is None else self.correction.state_dict()
        local = None if correction is None else local_correction(correction)
        return {
            "topology": self.topology.state_dict(),
            "correction": correction,
            "others": self.topology.world.gather_object(local)[1:],
            "refreshed": self._refreshed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved state until `attach`."""
        self._loaded = state_dict


def _copies(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the named parameters of a model and copies of their values; packed weights have other names."""
    parameters = dict(unwrap(model).named_parameters())
    return [(parameters[name], parameters[name].detach().clone()) for name in names if name in parameters]
