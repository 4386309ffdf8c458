"""A sparse weight as a topology sees it, however it is stored."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from equipoise.storage.bitmap import pack_bits


class Layer(ABC):
    """One weight and which of its places are active.

    Algorithms speak of flat places of the whole weight, of scores at all of them, and say "drop these, grow those";
    `MaskedLayer` keeps a dense tensor with zeros, `PackedWeight` the vector of the active values.
    """

    parameter: nn.Parameter

    def __init__(self, name: str, active: int, final: int) -> None:
        self.name = name
        self.active = self.initial = active
        self.final = final  # differs from `initial` under gradual pruning only
        self.memory: Tensor | None = None  # what an algorithm remembers per place
        self.loss_scale: Tensor | None = None  # that `gradient` has yet to be divided by, by a fused optimizer

    @property
    @abstractmethod
    def size(self) -> int:
        """All places."""

    @property
    def index(self) -> Tensor | None:
        """The flat places that the elements of `parameter` are at, ascending; None where it holds all of them."""
        return None

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """All places of the weight as a vector; inactive ones are zero."""

    @property
    @abstractmethod
    def gradient(self) -> Tensor | None:
        """The gradient at all places as a vector: dense at steps where the algorithm asked for it."""

    @abstractmethod
    def mask(self) -> Tensor:
        """Which places are active, in the shape of the weight."""

    @abstractmethod
    def explored(self) -> int:
        """How many places have been active at some time."""

    def digest(self) -> bytes:
        """A few bytes that two processes have in common when they have the same active places."""
        return hashlib.blake2b(pack_bits(self.mask().reshape(-1).cpu()).numpy().tobytes(), digest_size=8).digest()

    def lowest(self, score: Tensor, count: int, among: Tensor | None = None, ordered: bool = False) -> Tensor:
        """The flat places of the `count` active weights (or those `among` them) with the lowest score."""
        candidates = self.mask().reshape(-1) if among is None else among
        # An overflow is finite here, so that only what is no candidate is infinite and counts stay exact.
        finite = score.nan_to_num()
        return finite.masked_fill_(~candidates, torch.inf).topk(count, largest=False, sorted=ordered).indices

    def highest(self, score: Tensor, count: int, dropped: Tensor, regrow: bool) -> Tensor:
        """The flat places of the `count` inactive weights with the highest score.

        The just-`dropped` ones are candidates only where they may `regrow`.
        """
        taken = self.mask().reshape(-1)
        if regrow:
            taken = taken.index_fill(0, dropped, False)
        return score.masked_fill(taken, -torch.inf).topk(count, sorted=False).indices

    @abstractmethod
    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        """Drop and grow. Both end at zero in the weight and in every tensor of the optimizer's state."""

    # Gradients: what an optimizer sees is zero, or absent, at inactive places

    def watch(self, wanted: int | None) -> None:  # noqa: B027 - nothing to do where `.grad` has it
        """The coming step's gradient of inactive places is wanted: so many of the largest, or all (None)."""

    @abstractmethod
    def hide_inactive(self, tensor: Tensor) -> None:
        """Set inactive places of a tensor shaped like the parameter to exactly zero (whatever was there, NaN too)."""

    def begin_pass(self) -> None:  # noqa: B027 - likewise
        """A backward pass was made: whatever was put aside is of an earlier one, whose step was not taken."""

    @abstractmethod
    def keep_batch_gradient(self, earlier: Tensor | None) -> None:
        """Put aside what a backward pass has added to the `earlier` gradient, beside what passes before it have."""

    def put_aside(self) -> list[Tensor]:
        """Gradients that growth will look at and `.grad` does not hold: several processes average them too."""
        return []

    @abstractmethod
    def keep_dense_gradient(self) -> None:
        """Put the dense gradient aside and leave the optimizer the sparse one; once a backward pass."""

    @abstractmethod
    def forget_gradient(self) -> None:
        """Nothing that was put aside is of use any more."""

    # BSR-Net's rewiring of single places

    @property
    @abstractmethod
    def signs(self) -> Tensor:
        """-1 or 1 for every element of the parameter."""

    @abstractmethod
    def remember_signs(self) -> None:
        """Those of the initial weights, at all places."""

    @abstractmethod
    def switch_off(self, where: Tensor, states: Iterable[Tensor]) -> None:
        """Drop the active weights where this, shaped like the parameter, is true; `count` tells how many are left.

        The optimizer's state at a place stays there as long as the storage has one for it.
        """

    @abstractmethod
    def count(self) -> Tensor:
        """How many are active, on the device."""

    @abstractmethod
    def grow_inactive(self, ranks: Tensor, magnitude: float, states: Iterable[Tensor]) -> None:
        """Make the `ranks`-th inactive places, from 0, active, each at this magnitude with its own sign."""

    # Save and load

    @abstractmethod
    def saved(self) -> Tensor:
        """What a checkpoint keeps beside the model."""

    @abstractmethod
    def check(self, saved: Tensor) -> None:
        """Refuse the state of another model's weight."""

    @abstractmethod
    def saved_active(self, saved: Tensor) -> int:
        """How many weights are active by this state."""

    def lost(self, saved: Tensor) -> int:
        """How many weights attaching has set to zero that this state calls active and nothing has loaded since."""
        return 0

    @abstractmethod
    def load(self, saved: Tensor, memory: Tensor | None) -> None:
        """Take a saved state, when the model has its weights already."""
