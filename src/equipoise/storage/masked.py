"""A sparse weight kept as a dense tensor with exact zeros."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.layer import Layer

ACTIVE, DROPPED = -1, 1  # 0: never active so far

# Integers of the size of a floating-point number, by bytes: a mask of all bits or none keeps or clears any number,
# NaN too, several times faster on a CPU than filling by a boolean mask.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 2**22  # weights masked at a time: larger temporaries would be mapped anew by the system at every call


class MaskedLayer(Layer):
    """One weight and the places of it that are active, in one byte per weight.

    `places` is -1 (all bits set) where a weight is active, 1 where it once was, 0 where it never was: the mask and
    ITOP's record of exploration in the same tensor. `active` is known on the host, so nothing waits for a GPU.
    """

    def __init__(self, name: str, parameter: nn.Parameter, active: Tensor, final: int) -> None:
        super().__init__(name, len(active), final)
        self.parameter = parameter
        self.gradient_copy: Tensor | None = None  # the gradient of all places, while an update needs it
        self.attached: tuple[int, int] | None = None  # weights that were not zero before attaching; version after it
        self.batch_gradient: Tensor | None = None  # what of `.grad` comes from batches, where a correction adds to it
        places = torch.zeros(parameter.numel(), dtype=torch.int8)
        places[active] = ACTIVE
        self.places = torch.zeros_like(parameter, dtype=torch.int8, requires_grad=False)
        self.places.copy_(places.view(parameter.shape))

    @property
    def size(self) -> int:
        return self.parameter.numel()

    @property
    def weight(self) -> Tensor:
        """All places of the weight as a vector; inactive ones are zero."""
        return self.parameter.detach().reshape(-1)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient at all places as a vector: dense at steps where the algorithm asked for it."""
        found = self.parameter.grad if self.gradient_copy is None else self.gradient_copy
        return None if found is None else found.detach().reshape(-1)

    def mask(self) -> Tensor:
        self.follow_device()
        return self.places < 0

    def follow_device(self) -> None:
        """Masks go where `model.to(device)` has taken the weights."""
        device = self.parameter.device
        if self.places.device != device:
            self.places = self.places.to(device)
            self.memory = None if self.memory is None else self.memory.to(device)

    def hide_inactive(self, tensor: Tensor) -> None:
        """Set inactive places of a tensor shaped like the weight to exactly zero (whatever was there, NaN too)."""
        if self.active == self.size:
            return
        self.follow_device()
        bits = tensor.detach().view(BITS[tensor.element_size()])
        rows = max(1, BLOCK * len(bits) // self.size)
        for part, places in zip(bits.split(rows), self.places.split(rows), strict=True):
            part.bitwise_and_(places.clamp(max=0).to(tensor.device))

    def keep_dense_gradient(self) -> None:
        """Put the dense gradient aside and leave the optimizer the sparse one; once a backward pass."""
        gradient = self.parameter.grad
        if gradient is None:
            self.gradient_copy = None
        elif self.gradient_copy is None:
            self.gradient_copy = gradient.detach().clone() if self.batch_gradient is None else self.batch_gradient
            self.hide_inactive(gradient)

    def begin_pass(self) -> None:
        self.gradient_copy = None

    def forget_gradient(self) -> None:
        self.gradient_copy = self.batch_gradient = None

    def keep_batch_gradient(self, earlier: Tensor | None) -> None:
        """Put aside what a backward pass has added to the `earlier` gradient, beside what passes before it have."""
        gradient = self.parameter.grad
        if gradient is None or earlier is None or self.batch_gradient is None:
            self.batch_gradient = None if gradient is None else gradient.detach().clone()
        else:
            self.batch_gradient += gradient.detach() - earlier

    def put_aside(self) -> list[Tensor]:
        return [] if self.batch_gradient is None else [self.batch_gradient]

    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        """Drop and grow. Both end at zero in the weight and in every tensor of the optimizer's state."""
        changed = torch.zeros(self.size, dtype=torch.bool, device=self.places.device)
        changed.index_fill_(0, dropped, True).index_fill_(0, grown, True)
        for tensor in (self.parameter.detach(), *states):
            tensor.masked_fill_(changed.view(self.parameter.shape), 0)
        flat = self.places.reshape(-1).index_fill(0, dropped, DROPPED).index_fill_(0, grown, ACTIVE)
        self.places.copy_(flat.view(self.places.shape))
        self.active += len(grown) - len(dropped)

    # BSR-Net's rewiring of single places

    @property
    def signs(self) -> Tensor:
        assert self.memory is not None
        return self.memory

    def remember_signs(self) -> None:
        self.memory = torch.where(self.parameter.detach() < 0, -1, 1).to(torch.int8)

    def switch_off(self, where: Tensor, states: Iterable[Tensor]) -> None:
        crossed = self.mask() & where
        self.places.masked_fill_(crossed, DROPPED)
        self.parameter.masked_fill_(crossed, 0)

    def count(self) -> Tensor:
        return self.mask().sum()

    def grow_inactive(self, ranks: Tensor, magnitude: float, states: Iterable[Tensor]) -> None:
        inactive = (~self.mask()).reshape(-1).cumsum(0, dtype=torch.int32)
        where = _coordinates(torch.searchsorted(inactive, ranks.to(inactive.device) + 1), self.parameter.shape)
        self.parameter[where] = magnitude * self.signs[where].to(self.parameter.dtype)
        self.places[where] = self.places.new_full((), ACTIVE)  # a number from the host would make it wait
        self.active += len(ranks)

    def explored(self) -> int:
        """How many places have been active at some time."""
        return int(torch.count_nonzero(self.places))

    def saved(self) -> Tensor:
        return self.places

    def check(self, saved: Tensor) -> None:
        """Refuse the places of another model's weight."""
        if saved.shape != self.parameter.shape:
            was, now = tuple(saved.shape), tuple(self.parameter.shape)
            raise UserError(f'the mask of "{self.name}" has shape {was}, the weight {now}: another model')

    def saved_active(self, saved: Tensor) -> int:
        return int((saved < 0).sum())

    def lost(self, saved: Tensor) -> int:
        """Only a weight that was sparse already, by a mask like the saved one, can have lost what it needs."""
        if self.attached is None or self.attached[1] != self.parameter._version:
            return 0  # written since
        before, now = self.attached[0], int(torch.count_nonzero(self.parameter.detach()))
        return before - now if before <= self.saved_active(saved) else 0

    def load(self, saved: Tensor, memory: Tensor | None) -> None:
        self.places.copy_(saved)
        self.memory = None if memory is None else memory.to(self.parameter.device, copy=True)
        self.active = int(torch.count_nonzero(self.mask()))
        self.hide_inactive(self.parameter.detach())


def _coordinates(places: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """The indices of places by number, whatever the memory format; torch.unravel_index makes the host wait."""
    found = []
    for size in reversed(shape):
        found.append(places % size)
        places = places // size
    return tuple(reversed(found))
