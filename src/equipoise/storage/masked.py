"""Masked storage: a sparse weight is a dense tensor with exact zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.shards import local
from equipoise.storage.bitmap import get_bits, pack_bits
from equipoise.storage.flat import FlatParameters
from equipoise.storage.sparse_weight import BITS, SparseWeight, is_cleared

# Values of `activity`. ACTIVE has all bits set: `value & ACTIVE` keeps a number and `value & NEVER` clears it.
ACTIVE, NEVER, DROPPED = -1, 0, 1
UNCHANGED = 2  # by an update; in no mask
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

CHUNK = 2**22  # weights masked at a time on a CPU: larger temporaries would be mapped again at every call


class MaskedTensor:
    """A tensor that the optimizer steps, with one byte for each element: active, dropped or never active.

    The tensor is one weight of the model or, with `FlatParameters`, a vector of many weights. Elements that belong to
    no topology are active.

    Args:
        tensor: The parameter that the optimizer steps.
        shared: Whether the tensor holds several weights.
        compile: Applied to the masking function.
    """

    def __init__(
        self, tensor: nn.Parameter, shared: bool = False, compile: Compile = lambda function: function
    ) -> None:
        self.tensor = tensor
        self.shared = shared
        self._hide = compile(hide_inactive)
        self.activity = torch.full_like(local(tensor), ACTIVE, dtype=torch.int8, requires_grad=False)

    def follow_device(self) -> None:
        """Move the mask to the device of the weights, which `model.to(device)` may have changed."""
        if self.activity.device != self.tensor.device:
            self.activity = self.activity.to(self.tensor.device)

    def hide_inactive(self, other: Tensor) -> None:
        """Set the inactive elements of a tensor shaped like `tensor` to exactly zero."""
        self.follow_device()
        self._hide(other.detach(), self.activity)


def hide_inactive(tensor: Tensor, activity: Tensor) -> None:
    """Set the inactive elements of a tensor to exactly zero, NaN included.

    Args:
        tensor: The tensor.
        activity: `ACTIVE`, `DROPPED` or `NEVER` for each element.
    """
    if tensor.is_cuda and activity.is_cuda:
        tensor.detach().masked_fill_(activity >= 0, 0)
        return
    # Masking bits is exact for NaN and several times faster on a CPU than filling by a boolean mask.
    bits = tensor.detach().view(BITS[tensor.element_size()])
    rows = max(1, CHUNK * len(bits) // max(1, bits.numel()))
    for part, codes in zip(bits.split(rows), activity.split(rows), strict=True):
        part.bitwise_and_(codes.clamp(max=0).to(tensor.device))


def copy_active(targets: Sequence[Tensor], values: Sequence[Tensor], activities: Sequence[Tensor | None]) -> None:
    """Copy tensors; inactive elements of the targets become exactly zero.

    Args:
        targets: Where to write.
        values: What to write.
        activities: The activity of each target; `None` if all its elements are active.
    """
    for target, value, activity in zip(targets, values, activities, strict=True):
        target.copy_(value)
        if activity is not None:
            hide_inactive(target, activity)


class MaskedWeight(SparseWeight):
    """A weight of the model whose inactive entries are zero.

    Args:
        name: Name of the weight.
        parameter: The weight.
        active: Flat indices of the weights that are active at the start.
        final: Number of active weights at the end.
        masked: The tensor that the optimizer steps; the weight itself by default.
        flat: The layout of `masked` if the weight is a part of it.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        active: Tensor,
        final: int,
        masked: MaskedTensor | None = None,
        flat: FlatParameters | None = None,
    ) -> None:
        super().__init__(name, len(active), final)
        self.parameter = parameter
        self.masked = masked or MaskedTensor(parameter)
        self._flat = flat
        self._active: int | None = len(active)
        activity = torch.zeros(parameter.numel(), dtype=torch.int8)
        activity[active] = ACTIVE
        self.activity.copy_(self.part(activity.view(parameter.shape)))
        self.growth_recorder = GrowthRecorder(parameter)

    @property
    def stepped(self) -> nn.Parameter:
        return self.masked.tensor

    def view(self, tensor: Tensor) -> Tensor:
        return tensor if self._flat is None else self._flat.view(self.parameter, tensor)

    @property
    def activity(self) -> Tensor:
        """`ACTIVE`, `DROPPED` or `NEVER` for each weight that this process holds, in its shape."""
        return self.view(self.masked.activity)

    @property
    def active(self) -> int:
        if self._active is None:
            self._active = int(torch.count_nonzero(self.mask()))
        return self._active

    def recount(self) -> None:
        """Count the active weights again at the next use of `active`, after a change on the device."""
        self._active = None

    @property
    def size(self) -> int:
        return self.parameter.numel()

    @property
    def weight(self) -> Tensor:
        return self.whole(self.parameter.detach()).reshape(-1)

    @property
    def gradient(self) -> Tensor | None:
        found = self.parameter.grad if self.growth is None else self.growth
        return None if found is None else self.whole(found.detach()).reshape(-1)

    def mask(self) -> Tensor:
        self.follow_device()
        return self.whole(self.activity) == ACTIVE

    def explored(self) -> int:
        return int(torch.count_nonzero(self.whole(self.activity)))

    def follow_device(self) -> None:
        """Move mask and memory to the device of the weight, which `model.to(device)` may have changed."""
        self.masked.follow_device()
        if self.memory is not None and self.memory.device != self.parameter.device:
            self.memory = self.memory.to(self.parameter.device)

    def hide_inactive(self, tensor: Tensor) -> None:
        if self._active == self.size:
            return
        self.follow_device()
        hide_inactive(local(tensor), self.activity)

    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        codes = torch.full((self.size,), UNCHANGED, dtype=torch.int8, device=self.activity.device)
        codes.index_fill_(0, dropped, DROPPED).index_fill_(0, grown, ACTIVE)
        own = self.part(codes.view(self.parameter.shape))
        changed = own != UNCHANGED
        for tensor in (self.parameter.detach(), *states):
            local(tensor).masked_fill_(changed, 0)
        self.activity.copy_(torch.where(changed, own, self.activity))
        if self._active is not None:
            self._active += len(grown) - len(dropped)

    # Growth

    def record_growth(self, record: bool) -> None:
        self.growth_recorder.record = record
        self.growth_recorder.clear()

    @property
    def growth(self) -> Tensor | None:
        return self.growth_recorder.total

    @growth.setter
    def growth(self, value: Tensor) -> None:
        self.growth_recorder.total = value

    # Save and load

    def state_dict(self) -> dict[str, Tensor]:
        activity = self.whole(self.activity).cpu().reshape(-1)
        return {
            "shape": torch.tensor(self.parameter.shape),
            "mask": pack_bits(activity == ACTIVE),
            "explored": pack_bits(activity != NEVER),
        }

    def check_state(self, state: dict[str, Tensor]) -> int:
        self._check_bitmaps(state, ("mask", "explored"))
        return int(get_bits(state["mask"].cpu(), self.size).sum())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        explored, mask = (get_bits(state[part].cpu(), self.size) for part in ("explored", "mask"))
        codes = explored.to(torch.int8).masked_fill_(mask, ACTIVE)
        self.activity.copy_(self.part(codes.view(self.parameter.shape)))
        self._active = int(mask.sum())
        self.hide_inactive(self.parameter.detach())


class GrowthRecorder:
    """Sums the gradient of all entries of a weight over the backward passes of a step.

    `before_accumulation` and `after_accumulation` are hooks of the weight. A pass counts only if its gradient ends in
    `.grad`: `torch.autograd.grad` calls the first hook and not the second.

    Attributes:
        record: Whether passes are recorded.
        total: The sum; `None` if no pass was recorded.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.record = False
        self.clear()

    def clear(self) -> None:
        """Discard the recorded gradients."""
        self.total: Tensor | None = None
        self._pass: Tensor | None = None
        self._restart = True

    def before_accumulation(self, gradient: Tensor) -> None:
        """Remember the gradient of one pass before autograd adds it to `.grad`."""
        if self.record:
            # The reference keeps autograd from using this tensor as `.grad`, which is masked in place.
            self._pass, self._restart = gradient, is_cleared(self._parameter.grad)

    def after_accumulation(self) -> None:
        """Add the remembered gradient to the sum."""
        if self._pass is not None:
            self.add(self._pass, self._restart)
            self._pass = None

    @torch.no_grad()
    def add(self, gradient: Tensor, restart: bool = False) -> None:
        """Add the gradient of one pass to the sum; `restart` replaces the sum."""
        if self.total is None or restart:
            self.total = gradient.detach().clone()
        else:
            self.total += gradient.detach()
