"""The active weights of a model as one flat vector."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from equipoise.checks import require_whole
from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight


class SparseLayers(Protocol):
    """The attributes of a topology that an active vector reads: layers, and how often their masks have changed."""

    layers: list[SparseWeight]
    updates: int


class ActiveVector:
    """Maps tensors shaped like the parameters to one flat vector of the active weights, and back.

    The vector has an entry for every weight of a dense parameter (biases and norms take part, as in the paper) and
    for every weight of a sparse parameter that is active when this object is made. Gradients at the snapshot and
    tables of them are such vectors, so their size is the number of active weights.

    Args:
        parameters: The parameters that are corrected, in the order of the vector.
        topology: The topology of the model, if it has one.
        every_index: Keep the inactive weights too, for growth by the corrected gradient.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], topology: SparseLayers | None = None, every_index: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.topology = topology
        self.every_index = every_index
        self.dtype = max((p.dtype for p in self.parameters), key=lambda d: torch.finfo(d).bits)
        layers = {id(layer.parameter): layer for layer in topology.layers} if topology else {}
        self._layers = [layers.get(id(p)) for p in self.parameters]
        self.used: set[int] = set()  # parameters that took part in the loss of some batch
        self.take_active()

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def take_active(self) -> None:
        """Take the weights that are active at present."""
        every = self.every_index
        indices = [None if not x or x.active == x.size or every else _active_indices(x) for x in self._layers]
        self._set_indices(indices, 0 if self.topology is None else self.topology.updates)

    def _set_indices(self, indices: list[Tensor | None], made_at: int) -> None:
        self.indices = indices  # of each parameter, flat and ascending; None: all
        self.made_at = made_at  # topology updates before this vector
        self.sizes = [
            len(index) if index is not None else parameter.numel() if layer is None else layer.size
            for parameter, layer, index in zip(self.parameters, self._layers, indices, strict=True)
        ]
        self.size = sum(self.sizes)
        self._live: tuple[int, Tensor] | None = None

    def _stored(self, i: int) -> Tensor | None:
        """Return the indices that the i-th parameter holds at present; None: all."""
        layer = self._layers[i]
        return None if layer is None else layer.index

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return tensors shaped like the parameters as one vector; None stands for zeros."""
        parts = []
        for i, (tensor, size) in enumerate(zip(tensors, self.sizes, strict=True)):
            if tensor is None:
                parts.append(torch.zeros(size, dtype=self.dtype, device=self.parameters[i].device))
            else:
                flat = tensor.detach().reshape(-1)
                parts.append(_select(flat, self._stored(i), self.indices[i], size).to(self.dtype))
        return torch.cat(parts)

    def pack_gradients(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Like `pack`, and remember which parameters have a gradient."""
        self.used.update(i for i, gradient in enumerate(gradients) if gradient is not None)
        return self.pack(gradients)

    def unpack(self, vector: Tensor) -> list[Tensor]:
        """Return the vector as tensors shaped like the parameters, zero at weights that are not in it."""
        parts = vector.split(self.sizes)
        return [
            _select(part, self.indices[i], self._stored(i), parameter.numel()).view(parameter.shape)
            for i, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True))
        ]

    @torch.no_grad()
    def add_to(self, tensors: Sequence[Tensor | None], vector: Tensor) -> None:
        """Add the vector in place to tensors shaped like the parameters; None is left out."""
        for i, (tensor, part) in enumerate(zip(tensors, vector.split(self.sizes), strict=True)):
            if tensor is not None:
                _add(tensor, self._stored(i), self.indices[i], part.to(tensor.dtype))

    def spread(self, values: Tensor) -> Tensor:
        """Repeat one value per parameter at each of its entries."""
        return torch.cat([value.expand(size) for value, size in zip(values, self.sizes, strict=True)])

    def live(self) -> Tensor | None:
        """Return 1 for entries whose weight is active at present and 0 for the others; None if all are."""
        if self.topology is None or (self.topology.updates == self.made_at and not self.every_index):
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

    def renewed(self) -> Self:
        """Return the vector of the same parameters at the weights that are active at present."""
        new = copy.copy(self)
        new.used = set(self.used)
        new.take_active()
        return new

    def same_parameters(self, other: ActiveVector) -> bool:
        return [id(p) for p in self.parameters] == [id(p) for p in other.parameters]

    def known_to(self, older: ActiveVector) -> Tensor:
        """Return 1 for entries that `older` has too and 0 for the others."""
        return self.translate(older, torch.ones(older.size, dtype=self.dtype, device=self.device))

    def translate(self, older: ActiveVector, vector: Tensor) -> Tensor:
        """Return a vector of `older` with the entries of this one; entries that `older` has not are zero."""
        parts = zip(vector.split(older.sizes), older.indices, self.indices, self.sizes, strict=True)
        return torch.cat([_select(part, have, want, size) for part, have, want, size in parts])

    def state_dict(self) -> dict[str, Any]:
        return {"indices": self.indices, "made_at": self.made_at, "used": sorted(self.used)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, here = len(state["indices"]), len(self.parameters)
        if saved != here:
            raise UserError(f"the state has {saved} trainable parameters and the model has {here}")
        if not set(state["used"]) <= set(range(here)):
            raise UserError(f"the state names parameters other than 0 to {here - 1} as used")
        require_whole(0, made_at=state["made_at"])
        self.used = set(state["used"])
        indices = [None if index is None else index.to(self.device) for index in state["indices"]]
        for index, parameter, layer in zip(indices, self.parameters, self._layers, strict=True):
            _check_indices(index, parameter.numel() if layer is None else layer.size)
        self._set_indices(indices, state["made_at"])


def _check_indices(index: Tensor | None, size: int) -> None:
    """Refuse saved indices that are not ascending, or not in the weight."""
    if index is None or not len(index):
        return
    whole = index.dtype in (torch.int32, torch.int64) and index.dim() == 1
    if not whole or index[0] < 0 or index[-1] >= size or (index.diff() <= 0).any():
        raise UserError(f"the state has indices that are not ascending numbers from 0 to {size - 1}")


def _active_indices(layer: SparseWeight) -> Tensor:
    if layer.index is not None:
        return layer.index.clone()
    return layer.mask().reshape(-1).nonzero().squeeze(1).to(torch.int32)  # half the memory, enough for any layer


def _select(flat: Tensor, have: Tensor | None, want: Tensor | None, size: int) -> Tensor:
    """Return the values at the `size` indices `want` of a vector at the indices `have`; missing ones are zero.

    Indices are ascending; None stands for all of them.
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
    """Add a vector at the indices `index` to a tensor that holds the indices `have`."""
    if have is not None:
        part, index = _select(part, index, have, len(have)), None
    if index is None:
        tensor.add_(part.view(tensor.shape))
    elif tensor.is_contiguous():
        tensor.view(-1).index_add_(0, index, part)
    else:
        dense = torch.zeros(tensor.numel(), dtype=part.dtype, device=part.device)
        tensor.add_(dense.index_add_(0, index, part).view(tensor.shape))
