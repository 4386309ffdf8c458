"""An exponential moving average of the weights that follows the topology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.modules import preserved_values
from equipoise.shards import is_sharded, local, reshard, share
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import Compile, hide_inactive
from equipoise.topology.topology import Topology


class EMA:
    """Exponential moving average of all parameters that follows the topology: θ̄ ← d·θ̄ + (1-d)·θ.

        ema = eq.EMA(model, topology=topology)
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.applied(), torch.no_grad():  # BatchNorm: torch.optim.swa_utils.update_bn(loader, model) in here
            evaluate(model)

    The decay rises to `decay` as (1+t)/(10+t), so that the random initial weights soon lose their influence. When the
    topology changes, the average of a dropped weight becomes zero and that of a grown weight starts at zero, also if
    one update drops and regrows it. In packed storage the values move with their indices, which torch's AveragedModel
    does not do.

    Args:
        model: The model.
        decay: Decay d, such as 0.995.
        topology: The topology of the model; found from the model by default. If it is attached later, call `follow`.
        flat: The layout of the parameters if they are views of one vector.
        compile: Applied to the function that runs on the device at every step.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.995,
        topology: Topology | None = None,
        flat: FlatParameters | None = None,
        compile: Compile = lambda function: function,
    ) -> None:
        if not 0 < decay < 1:
            raise UserError(f"ema={decay}: the decay of the weight average must be in (0, 1), such as 0.995")
        self.decay = decay
        self.steps = 0
        self.topology: Topology | None = None
        self._model = model
        self._blend = compile(blend)
        self.parameters = dict(model.named_parameters())
        loose = [p for p in self.parameters.values() if flat is None or not p.requires_grad]
        self._stepped = loose if flat is None else [*flat.stretches, *loose]
        self._averages = [tensor.detach().clone() for tensor in self._stepped]
        self._rate = torch.zeros((), dtype=torch.float64, device=self._stepped[0].device)  # 1 - d
        self._known_rate = 0.0
        averages = dict(zip(map(id, self._stepped), self._averages, strict=True))
        self.values = {
            name: averages[id(p)]
            if id(p) in averages or flat is None
            else flat.view(p, averages[id(flat.stretch_of(p))])
            for name, p in self.parameters.items()
        }
        found = Topology.only(model, topology)
        if found is not None:
            self.follow(found)

    def tensor_of(self, stepped: nn.Parameter) -> Tensor | None:
        """The average of a tensor that the optimizer steps; `None` if there is none."""
        pairs = zip(self._stepped, self._averages, strict=True)
        return next((average for tensor, average in pairs if tensor is stepped), None)

    def follow(self, topology: Topology) -> None:
        """Let a topology change the average together with the weights."""
        self.topology = topology
        topology.follow(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy follows the copied topology."""
        self.__dict__.update(state)
        if self.topology is not None:
            self.follow(self.topology)

    def update(self) -> None:
        """Update the average with the current weights, after an optimizer step."""
        if self.topology is not Topology.only(self._model) is not None:
            raise UserError("a topology was attached after the EMA was created; call ema.follow(topology)")
        self.begin_step(self.steps)
        self.blend()

    def begin_step(self, number: int) -> None:
        """Set the decay of update `number`, counted from 0."""
        self.steps = number + 1
        rate = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        if rate != self._known_rate:  # the rate is constant after the first steps
            self._rate.fill_(rate)
            self._known_rate = rate

    @torch.no_grad()
    def blend(self) -> None:
        """Move the average towards the weights by the current rate; a CUDA graph can replay this."""
        for average, tensor in zip(self._averages, self._stepped, strict=True):
            activity = None if self.topology is None else self.topology.activity_of(tensor)
            self._blend(local(average), local(tensor.detach()), self._rate, activity)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the model with the averaged weights; its weights and buffers are restored afterwards."""
        with preserved_values(self._model.buffers()), weights_of(self._model, self.values):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, and the number of updates."""
        return {"steps": self.steps, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the averages of a saved run, after its model: packed vectors may have another length.

        Raises:
            UserError: If an average does not have the shape of its parameter.
        """
        for name, parameter in self.parameters.items():
            if (shape := state["values"][name].shape) != parameter.shape:
                raise UserError(
                    f'the average of "{name}" has the shape {list(shape)}, the model has {list(parameter.shape)}; '
                    "load the state of the model first"
                )
        self.steps = state["steps"]
        for name, value in self.values.items():
            saved = state["values"][name]
            if is_sharded(value):
                local(value).copy_(local(saved) if is_sharded(saved) else share(saved, value))
            elif saved.shape == value.shape:
                value.copy_(saved)
            else:
                value.data = saved.to(value, copy=True)


def blend(average: Tensor, weights: Tensor, rate: Tensor, activity: Tensor | None) -> None:
    """Move an average towards the weights, in place; set it to zero at weights that are inactive."""
    average.lerp_(weights, rate.to(average))
    if activity is not None:
        hide_inactive(average, activity)


@contextmanager
def weights_of(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the model with other weights; the original weights are restored afterwards."""
    reshard(model)
    original = {name: local(p).clone() if is_sharded(p) else p.data for name, p in model.named_parameters()}
    if added := set(original) - set(values):
        raise UserError(f'"{min(added)}" was added to the model after its average was created; create a new average')
    try:
        _set_weights(model, values)
        yield
    finally:
        _set_weights(model, original)


@torch.no_grad()
def _set_weights(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    reshard(model)
    for name, p in model.named_parameters():
        if is_sharded(p):
            local(p).copy_(local(values[name]))  # fully_shard gathers from this memory
        else:
            p.data = values[name]
