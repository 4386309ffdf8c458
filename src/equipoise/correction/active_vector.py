"""The coordinates that a correction speaks of, as one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology import Topology


class Coordinates:
    """Where the active weights were at a snapshot: parameters to one flat vector and back.

    All trainable parameters take part (biases and norms too, as in the paper); of a sparse weight only the places
    that are active when this object is made. g_old, g̃ and replay tables are vectors in these coordinates, so they
    have the size of the active weights. With `every_place` the inactive ones are kept too, for growth by the
    corrected gradient.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], topology: Topology | None = None, every_place: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.topology = topology
        self.every_place = every_place
        self.made_at = 0 if topology is None else topology.updates  # the masks of then
        layers = {id(layer.parameter): layer for layer in topology.layers} if topology else {}
        self._layers = [layers.get(id(p)) for p in self.parameters]
        # int32 suffices for any layer and is what the indexing kernels accept at half the memory
        self.index = [
            None if layer is None or layer.active == layer.size or every_place else _places(layer)
            for layer in self._layers
        ]
        self._measure()
        self.dtype = max((p.dtype for p in self.parameters), key=lambda d: torch.finfo(d).bits)
        self._live: tuple[int, Tensor] | None = None
        self._used: set[int] = set()  # parameters that had a gradient in some batch

    def _measure(self) -> None:
        self.sizes = [
            len(index) if index is not None else parameter.numel() if layer is None else layer.size
            for parameter, layer, index in zip(self.parameters, self._layers, self.index, strict=True)
        ]
        self.size = sum(self.sizes)

    def _have(self, i: int) -> Tensor | None:
        """The places that a tensor shaped like the i-th parameter holds now; None: all. A snapshot has its own."""
        layer = self._layers[i]
        return None if layer is None else layer.index

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Tensors shaped like the parameters, at these coordinates; None is zero."""
        parts = []
        for i, (parameter, tensor, size) in enumerate(zip(self.parameters, tensors, self.sizes, strict=True)):
            if tensor is None:
                parts.append(torch.zeros(size, dtype=self.dtype, device=parameter.device))
            else:
                flat = tensor.detach().reshape(-1)
                parts.append(_select(flat, self._have(i), self.index[i], size).to(self.dtype))
        return torch.cat(parts)

    def unpack(self, vector: Tensor) -> list[Tensor]:
        """The opposite of `pack`: tensors shaped like the parameters, zero at places without a coordinate."""
        parts = vector.split(self.sizes)
        return [
            _select(part, self.index[i], self._have(i), parameter.numel()).view(parameter.shape)
            for i, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True))
        ]

    def spread(self, values: Tensor) -> Tensor:
        """One value per parameter, repeated at each of its coordinates."""
        return torch.cat([value.expand(size) for value, size in zip(values, self.sizes, strict=True)])

    def differentiate(self, loss: Tensor) -> Tensor:
        """The gradient of a loss, at these coordinates, without touching `.grad`."""
        wanted = [p for p in self.parameters if p.requires_grad]  # some may be frozen since
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        return self._pack_gradients([next(found) if p.requires_grad else None for p in self.parameters])

    def gradients(self) -> Tensor:
        """What `.grad` holds now, at these coordinates."""
        return self._pack_gradients([p.grad for p in self.parameters])

    def _pack_gradients(self, gradients: Sequence[Tensor | None]) -> Tensor:
        self._used.update(i for i, gradient in enumerate(gradients) if gradient is not None)
        return self.pack(gradients)

    @torch.no_grad()
    def add_to_gradients(self, vector: Tensor) -> None:
        """Add to `.grad`, also of a parameter that took part in other batches but not in this one."""
        for i, (parameter, part) in enumerate(zip(self.parameters, vector.split(self.sizes), strict=True)):
            if parameter.grad is None and parameter.requires_grad and i in self._used:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                _add(parameter.grad, self._have(i), self.index[i], part.to(parameter.grad.dtype))

    def live(self) -> Tensor | None:
        """1 where a coordinate is active now, 0 where it is not; None where all are."""
        if self.topology is None or (self.topology.updates == self.made_at and not self.every_place):
            return None
        if self._live is None or self._live[0] != self.topology.updates:
            masks = [
                torch.ones((), device=p.device).expand(p.shape)
                if layer is None or layer.index is not None
                else layer.mask()
                for p, layer in zip(self.parameters, self._layers, strict=True)
            ]
            self._live = (self.topology.updates, self.pack(masks))
        return self._live[1]

    def renewed(self) -> Coordinates:
        """The same parameters, at the places that are active now."""
        new = Coordinates(self.parameters, self.topology, self.every_place)
        new._used = set(self._used)
        return new

    def same_parameters(self, other: Coordinates) -> bool:
        return [id(p) for p in self.parameters] == [id(p) for p in other.parameters]

    def known_to(self, older: Coordinates) -> Tensor:
        """1 at the coordinates that `older` has too."""
        return self.translate(older, torch.ones(older.size, dtype=self.dtype, device=self.parameters[0].device))

    def translate(self, older: Coordinates, vector: Tensor) -> Tensor:
        """A vector in older coordinates, in these; zero where it had none."""
        parts = zip(vector.split(older.sizes), older.index, self.index, self.sizes, strict=True)
        return torch.cat([_select(part, have, want, size) for part, have, want, size in parts])

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index, "made_at": self.made_at, "used": sorted(self._used)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["index"]) != len(self.parameters):
            there, here = len(state["index"]), len(self.parameters)
            raise UserError(f"the state is of {there} trainable parameters, the model has {here}")
        device = self.parameters[0].device
        self.index = [None if index is None else index.to(device) for index in state["index"]]
        self.made_at, self._used, self._live = state["made_at"], set(state["used"]), None
        self._measure()


def _places(layer: SparseWeight) -> Tensor:
    return (
        layer.mask().reshape(-1).nonzero().squeeze(1).to(torch.int32) if layer.index is None else layer.index.clone()
    )


def _select(flat: Tensor, have: Tensor | None, want: Tensor | None, size: int) -> Tensor:
    """The values of a vector that is at the places `have`, at the `size` places `want`: zero where it has none.

    None stands for all places in order; the others are ascending.
    """
    if have is None or len(have) == 0:
        return flat.new_zeros(size) if have is not None else flat if want is None else flat.index_select(0, want)
    if want is None:
        return torch.zeros(size, dtype=flat.dtype, device=flat.device).index_add_(0, have, flat)
    if torch.equal(have, want):
        return flat
    nearest = torch.searchsorted(have, want).clamp_(max=len(have) - 1)
    return torch.where(have[nearest] == want, flat[nearest], 0)


def _add(tensor: Tensor, have: Tensor | None, index: Tensor | None, part: Tensor) -> None:
    """Add a flat vector at the places `index` to a tensor that holds the places `have`."""
    if have is not None:
        part, index = _select(part, index, have, len(have)), None
    if index is None:
        tensor.add_(part.view(tensor.shape))
    elif tensor.is_contiguous():
        tensor.view(-1).index_add_(0, index, part)
    else:
        dense = torch.zeros(tensor.numel(), dtype=part.dtype, device=part.device)
        tensor.add_(dense.index_add_(0, index, part).view(tensor.shape))
