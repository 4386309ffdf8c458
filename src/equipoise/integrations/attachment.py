"""A topology that a framework attaches, saves and resumes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.topology import Algorithm, Topology
from equipoise.topology.selection import unwrap
from equipoise.world import World


class Attachment:
    """Base of the callbacks: the topology of one training.

    Frameworks load the model and the optimizer before their callbacks may attach anything. So a loaded state waits
    until `attach`, which restores it together with the weights.

    Args:
        algorithm: The topology, such as `eq.RigL(sparsity=0.9)`.
        total_steps: Number of optimizer steps of the whole training; by default the framework tells it.

    Attributes:
        topology: The topology of the current training; `None` before it starts.
    """

    def __init__(self, algorithm: Algorithm, *, total_steps: int | None = None) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.total_steps = total_steps
        self.topology: Topology | None = None
        self._loaded: dict[str, Any] | None = None

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int | None, world: World
    ) -> None:
        """Attach the topology, or continue with the one that was loaded.

        Args:
            model: The model, with its weights of this moment.
            optimizer: Its optimizer.
            total_steps: Number of optimizer steps, unless the user has given it.
            world: The processes that train the model together.
        """
        self.detach()
        loaded, self._loaded = self._loaded, None
        weights = _copies(model, () if loaded is None else loaded["topology"]["layers"])
        total_steps = self.total_steps or total_steps
        self.topology = Topology(self.algorithm, model, optimizer, total_steps, world=world)
        if loaded is not None:
            with torch.no_grad():  # attaching has set some of them to zero
                for parameter, weight in weights:
                    parameter.copy_(weight)
            self.topology.load_state_dict(loaded["topology"])

    def detach(self) -> None:
        """Remove the hooks of the topology; masks and weights stay as they are."""
        if self.topology is not None:
            self.topology.detach()

    def metrics(self) -> dict[str, float]:
        """Density and exploration (ITOP's R_s), for the framework's logs."""
        if self.topology is None:
            return {}
        return {"density": self.topology.density, "exploration": self.topology.exploration}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the framework's checkpoint; empty before the training starts."""
        if self.topology is None:
            return self._loaded or {}
        return {"topology": self.topology.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved state until `attach`."""
        self._loaded = state_dict


def _copies(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the named parameters of a model with copies of their values; packed weights have other names."""
    parameters = dict(unwrap(model).named_parameters())
    return [(parameters[name], parameters[name].detach().clone()) for name in names if name in parameters]
