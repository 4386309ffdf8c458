"""All numbers of a model in one vector, so that one kernel updates them and one gather reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.correction.active_vector import ActiveVector, SparseLayers
from equipoise.storage.masked import MaskedLayer
from equipoise.topology import Topology

ALIGNMENT = 64  # numbers: compiled kernels read whole vectors of 16 bytes at the start of every tensor
ALWAYS_ACTIVE = -2  # in `places`: numbers that no topology owns, and the gaps between tensors


class Slot(NamedTuple):
    """Where a parameter lies in the vector."""

    parameter: nn.Parameter
    start: int

    def view(self, vector: Tensor) -> Tensor:
        """The parameter's part of a vector, shaped as it is; four-dimensional ones with channels last."""
        shape = self.parameter.shape
        part = vector[self.start : self.start + self.parameter.numel()]
        if len(shape) != 4:
            return part.view(shape)
        outputs, inputs, height, width = shape
        return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


class Flat:
    """Parameters, gradients, masks, and whatever else has one number per weight, each as one vector.

    The parameters stay what they are: tensors of the model, now views of one vector. Each group of the optimizer is
    one stretch, sparse weights first. The last numbers of every vector belong to no parameter: `spare` is a place to
    write to where nothing shall be written.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, topology: Topology) -> None:
        sparse = {id(layer.parameter) for layer in topology.layers}
        self.slots: list[Slot] = []
        self.groups: list[slice] = []
        end = 0
        for group in optimizer.param_groups:
            begin = end
            for parameter in sorted(group["params"], key=lambda p: id(p) not in sparse):
                self.slots.append(Slot(parameter, end))
                end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            self.groups.append(slice(begin, end))
        self.spare = end
        self.size = end + ALIGNMENT
        self.device = self.slots[0].parameter.device
        self.dtype = self.slots[0].parameter.dtype
        self._slot_of = {id(slot.parameter): slot for slot in self.slots}
        self.parameters = self.new()
        self.gradients = self.new()
        self.gradient_views = self.views(self.gradients)
        self.places = self.new(torch.int8, ALWAYS_ACTIVE)
        with torch.no_grad():
            for slot in self.slots:
                slot.parameter.data = self.moved(slot.parameter, slot.parameter.data, self.parameters)
            for layer in topology.layers:
                assert isinstance(layer, MaskedLayer)
                layer.follow_device()
                layer.places = self.moved(layer.parameter, layer.places, self.places)

    def new(self, dtype: torch.dtype | None = None, value: float = 0) -> Tensor:
        return torch.full((self.size,), value, dtype=dtype or self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        return [slot.view(vector) for slot in self.slots]

    def start(self, parameter: Tensor) -> int:
        return self._slot_of[id(parameter)].start

    def view(self, parameter: Tensor, vector: Tensor) -> Tensor:
        return self._slot_of[id(parameter)].view(vector)

    def moved(self, parameter: Tensor, tensor: Tensor, vector: Tensor) -> Tensor:
        """The same values as a view of the vector."""
        view = self.view(parameter, vector)
        view.copy_(tensor)
        return view

    def positions(self, active: ActiveVector) -> Tensor:
        """The position of every entry of an active vector in the vector of all numbers."""
        numbers = torch.arange(self.size, device=self.device, dtype=torch.int32)
        parts = [self.view(p, numbers).reshape(-1) for p in active.parameters]
        chosen = [
            part if index is None else part.index_select(0, index)
            for part, index in zip(parts, active.indices, strict=True)
        ]
        return torch.cat(chosen)


class FlatVector(ActiveVector):
    """The active vector of parameters that lie in one vector, with the position of every entry in it."""

    def __init__(
        self, flat: Flat, parameters: Sequence[nn.Parameter], topology: SparseLayers | None, every_index: bool = False
    ) -> None:
        self._flat = flat
        super().__init__(parameters, topology, every_index)
        self.used = set(range(len(self.parameters)))

    def _set_indices(self, indices: list[Tensor | None], made_at: int) -> None:
        super()._set_indices(indices, made_at)
        self.positions = self._flat.positions(self)

    def live(self) -> Tensor | None:
        if self.topology is None or (self.topology.updates == self.made_at and not self.every_index):
            return None
        if self._live is None or self._live[0] != self.topology.updates:
            mask = self._flat.places.index_select(0, self.positions) < 0
            self._live = (self.topology.updates, mask.to(self.dtype))
        return self._live[1]
