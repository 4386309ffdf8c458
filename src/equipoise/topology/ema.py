"""A running average of the weights that keeps to the current topology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.topology import Topology
from equipoise.topology.topology import FOLLOWERS


class EMA:
    """Exponential moving average of all parameters, θ̄ ← d·θ̄ + (1-d)·θ, which follows the topology.

        average = equipoise.EMA(model, topology=topology)  # 0.995
        ...
        optimizer.step()
        average.update()
        ...
        with average.applied(), torch.no_grad():  # BatchNorm: torch.optim.swa_utils.update_bn(loader, model) in here
            evaluate(model)

    The decay starts low and rises to `decay` ((1+t)/(10+t) until then), so that the random initial weights do not
    linger. When the topology changes, the average is projected on it: what was dropped is zero at once, and what was
    grown begins anew, also where one update dropped and regrew it. In packed storage its values move with their
    places, which torch's AveragedModel does not do. It may be made before the topology is attached, or after.
    """

    def __init__(self, model: nn.Module, decay: float = 0.995, topology: Topology | None = None) -> None:
        if not 0 < decay < 1:
            raise UserError(f"average={decay}: the decay of the weight average is in (0, 1), such as 0.995")
        self.decay = decay
        self.steps = 0
        self._topology = topology
        self._model = model
        self.parameters = dict(model.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._follow()

    def _follow(self) -> None:
        """Let topologies, of now or to come, move and clear the average with the weights."""
        self._names = {id(p): name for name, p in self.parameters.items()}
        FOLLOWERS.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy follows its own parameters."""
        self.__dict__.update(state)
        self._follow()

    @property
    def topology(self) -> Topology | None:
        """The one that was given, or whichever is attached to the model now."""
        return Topology.of(self._model) if self._topology is None else self._topology

    @property
    def next_decay(self) -> float:
        """d of the coming update."""
        return min(self.decay, (2 + self.steps) / (11 + self.steps))

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average."""
        torch._foreach_lerp_(list(self.values.values()), list(self.parameters.values()), 1 - self.next_decay)
        self.steps += 1
        if (topology := self.topology) is not None:
            topology.project(self.values)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the average in place of its weights; those, and its buffers, come back afterwards."""
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        try:
            with weights_of(self._model, self.values):
                yield
        finally:
            for name, buffer in self._model.named_buffers():
                buffer.detach().copy_(buffers[name])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        for name, value in self.values.items():
            if (saved := state["values"][name]).shape == value.shape:
                value.copy_(saved)
            else:  # packed weights may have been more or fewer
                value.data = saved.to(value, copy=True)

    def value_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The average of one parameter, which a topology changes together with its places."""
        name = self._names.get(id(parameter))
        return None if name is None else self.values[name]


@contextmanager
def weights_of(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the model with other weights; its own come back afterwards, untouched."""
    own = {name: p.data for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():
            p.data = values[name]
        yield
    finally:
        for name, p in model.named_parameters():
            p.data = own[name]
