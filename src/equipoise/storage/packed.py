"""A sparse weight kept as the vector of its active values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.bitmap import get_bits, pack_bits, set_bits
from equipoise.storage.layer import Layer
from equipoise.storage.packed_modules import PackedLayer


class Seen(NamedTuple):
    """The dense gradient of a layer as far as growth needs it: at active places and at the largest of the others."""

    at: Tensor  # the active places
    active: Tensor
    places: Tensor
    values: Tensor

    def spread(self, size: int) -> Tensor:
        """At all places; zero where it is not known."""
        dense = self.active.new_zeros(size).index_copy_(0, self.at.long(), self.active)
        return dense.index_copy_(0, self.places, self.values)


class PackedWeight(Layer):
    """A packed layer as a topology sees it.

    Between updates everything has the size of the active weights, but for one bit per place: whether it has ever been
    active. During an update the vectors that algorithms look at have the size of the layer, one layer at a time.
    """

    def __init__(self, name: str, module: PackedLayer, final: int) -> None:
        super().__init__(name, module.values.numel(), final)
        self.module = module
        self.memory = module.memory
        self._explored = pack_bits(module.mask.reshape(-1))
        self._wanted: int | None = 0
        # Gradients, each of one backward pass; a tensor: at all places
        self._counted: list[Seen | Tensor] = []  # of the step so far
        self._latest: Seen | Tensor | None = None  # of a pass that may turn out not to belong to the step
        self._sum: Tensor | None = None  # of the running pass, until the layer's last use in it
        self._pass = -1  # autograd's number of the pass that was seen last
        self._before = (0, 0)  # which tensor `.grad` was when that pass began, and in which version

    @property
    def parameter(self) -> nn.Parameter:  # type: ignore[override]
        return self.module.values

    @property
    def size(self) -> int:
        return self.module.shape.weight_numel

    @property
    def index(self) -> Tensor:
        return self.module.index

    @property
    def weight(self) -> Tensor:
        return self._spread(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        if (seen := self._seen) is not None:
            return _dense(seen, self.size)
        return None if self.parameter.grad is None else self._spread(self.parameter.grad)

    def _spread(self, vector: Tensor) -> Tensor:
        return vector.new_zeros(self.size).index_copy_(0, self.index.long(), vector)

    def mask(self) -> Tensor:
        return self.module.mask

    def explored(self) -> int:
        return int(get_bits(self._explored, self.size).sum())

    def lowest(self, score: Tensor, count: int, among: Tensor | None = None, ordered: bool = False) -> Tensor:
        """As in masked storage; looked for among the active places alone, which are few."""
        places = self.index.long()
        finite = score[places].nan_to_num()
        if among is not None:
            finite.masked_fill_(~among[places], torch.inf)
        return places[finite.topk(count, largest=False, sorted=ordered).indices]

    @torch.no_grad()
    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        kept = ~torch.isin(self.index, dropped.to(torch.int32))
        self._carry(kept, grown.to(torch.int32), torch.zeros(len(grown)), states)

    def _carry(self, kept: Tensor, grown: Tensor, values: Tensor, states: Iterable[Tensor]) -> None:
        """Survivors keep their values and states; what is grown starts at `values`, and at zero in the states."""
        index, order = torch.cat([self.index[kept], grown]).sort()

        def carried(tensor: Tensor, born: Tensor) -> Tensor:
            return torch.cat([tensor[kept], born.to(tensor.dtype)])[order]

        for tensor in states:
            tensor.data = carried(tensor, torch.zeros(len(grown)))
        self.module.rewire(index, carried(self.parameter.detach(), values))
        set_bits(self._explored, grown)
        self.active = len(index)

    # Gradients

    def watch(self, wanted: int | None) -> None:
        self._wanted = wanted
        self._sum, self.module.uses = None, 0
        self.module.watcher = None if wanted == 0 else self._see

    def _see(self, gradient: Tensor) -> None:
        """The dense gradient of one use of the layer; TRADES uses it twice in a pass."""
        if (number := torch._C._current_graph_task_id()) != self._pass:
            self._begin(number)
        flat = gradient.detach().reshape(-1)
        self._sum = flat if self._sum is None else self._sum + flat
        self.module.uses -= 1
        if self.module.uses <= 0:  # the last: from here on not all places need be held
            self._end_pass()

    def _begin(self, number: int) -> None:
        """A pass has reached the layer. As in masked storage a step's passes add up, and begin where `.grad` does."""
        gradient = self.parameter.grad
        if gradient is None or (gradient.numel() and not gradient.any()):
            self.forget_gradient()  # of a step that was not taken
        else:
            self._settle()
        self._pass, self._before = number, _version(gradient)

    def _end_pass(self) -> None:
        if self._sum is None:
            return
        total = self._sum if self._latest is None else self._sum + _dense(self._latest, self.size)
        self._latest, self._sum, self.module.uses = self._needed(total), None, 0

    def _settle(self) -> None:
        """The last pass is one of the step's if it has changed `.grad`: one at a snapshot leaves it alone."""
        self._end_pass()
        latest, self._latest = self._latest, None
        gradient = self.parameter.grad
        if latest is None or gradient is None or _version(gradient) == self._before:
            return
        if isinstance(latest, Tensor) and self._counted and isinstance(self._counted[-1], Tensor):
            self._counted[-1] += latest
        else:
            self._counted.append(latest)

    @property
    def _seen(self) -> Seen | Tensor | None:
        """The dense gradient of the step so far: as far as it is kept, or at all places."""
        self._settle()
        if len(self._counted) > 1:
            self._counted = [torch.stack([_dense(one, self.size) for one in self._counted]).sum(0)]
        return self._counted[0] if self._counted else None

    def _needed(self, flat: Tensor) -> Seen | Tensor:
        """Only what growth can need of a dense gradient is kept."""
        if self._wanted is None:
            return flat.clone()
        active, size = flat[self.index.long()], flat.abs().index_fill_(0, self.index.long(), -torch.inf)
        places = size.topk(min(self._wanted, self.size - self.active), sorted=False).indices
        at = self.index.detach()  # an alias: a snapshot puts other data into the buffer itself
        return Seen(at, active, places, flat[places])

    def put_aside(self) -> list[Tensor]:
        return [seen] if isinstance(seen := self._seen, Tensor) else []

    def hide_inactive(self, tensor: Tensor) -> None:
        pass

    def keep_batch_gradient(self, earlier: Tensor | None) -> None:
        pass  # what a correction adds is not in the dense gradient

    def keep_dense_gradient(self) -> None:
        pass  # `.grad` never has it

    def forget_gradient(self) -> None:
        self._counted, self._latest, self._sum = [], None, None

    # BSR-Net

    @property
    def signs(self) -> Tensor:
        assert self.memory is not None
        return get_bits(self.memory, self.size, self.index).to(torch.int8) * 2 - 1

    def remember_signs(self) -> None:
        """Done when the layer was packed: here the initial weights of inactive places are gone."""
        if self.memory is None:
            raise UserError(f'"{self.name}" was packed without the signs of its weights: pack(model, BSRNet(...))')

    def switch_off(self, where: Tensor, states: Iterable[Tensor]) -> None:
        if bool(where.any()):
            self._carry(~where, self.index[:0], self.parameter.detach()[:0], states)

    def count(self) -> Tensor:
        return torch.tensor(self.active)

    def grow_inactive(self, ranks: Tensor, magnitude: float, states: Iterable[Tensor]) -> None:
        # before the j-th active place, index[j] - j places are inactive
        before = torch.searchsorted(self.index - torch.arange(self.active), ranks.long(), right=True)
        places = (ranks.long() + before).to(torch.int32)
        assert self.memory is not None
        signs = get_bits(self.memory, self.size, places).float() * 2 - 1
        self._carry(torch.ones(self.active, dtype=torch.bool), places, magnitude * signs, states)

    # Save and load

    def saved(self) -> Tensor:
        return self._explored

    def check(self, saved: Tensor) -> None:
        if saved.shape != self._explored.shape or saved.dtype != torch.uint8:
            raise UserError(f'the state of "{self.name}" is not that of {self.size} packed places: another model')

    def saved_active(self, saved: Tensor) -> int:
        return self.parameter.numel()  # the model has been loaded before

    def load(self, saved: Tensor, memory: Tensor | None) -> None:
        self._explored = saved.clone()
        self.memory = None if memory is None else memory.clone()
        self.active = self.parameter.numel()


def _dense(seen: Seen | Tensor, size: int) -> Tensor:
    return seen if isinstance(seen, Tensor) else seen.spread(size)


def _version(gradient: Tensor | None) -> tuple[int, int]:
    """Differs before and after a backward pass has added to a gradient, or has made it."""
    return (0, 0) if gradient is None else (id(gradient), gradient._version)
