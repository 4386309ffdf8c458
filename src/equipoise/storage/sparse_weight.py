"""A sparse weight, independent of how it is stored."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.storage.bitmap import pack_bits

TIE = 1e-9  # relative difference of float64 scores that may be rounding
# Integers as wide as each floating-point type.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SparseWeight(ABC):
    """One weight and the set of its active indices.

    Topology algorithms work with flat indices into the whole weight and with scores for all of them. They say "drop
    these, grow those". `MaskedWeight` keeps a dense tensor with zeros, `PackedWeight` the vector of active values.

    Attributes:
        name: Name of the weight in the model before packing, such as `features.0.weight`.
        parameter: The parameter that holds the values.
        initial: Number of active weights at the start.
        final: Number of active weights at the end. Differs from `initial` only under gradual pruning.
        memory: State of the algorithm for each index, such as the momentum of SNFS; `None` if it has none.
    """

    parameter: nn.Parameter

    def __init__(self, name: str, active: int, final: int) -> None:
        self.name = name
        self.initial = active
        self.final = final
        self.memory: Tensor | None = None

    @property
    @abstractmethod
    def active(self) -> int:
        """Number of active weights."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of weights, active or not."""

    @property
    def index(self) -> Tensor | None:
        """Ascending flat indices of the elements of `parameter`; `None` if the parameter holds all weights."""
        return None

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """All weights as a vector; inactive ones are zero."""

    @property
    @abstractmethod
    def gradient(self) -> Tensor | None:
        """Gradient of all weights as a vector.

        Inactive weights have their gradient only during a step for which `record_growth` was called. `None` if the
        weight took no part in the loss.
        """

    @property
    def local_gradient(self) -> Tensor | None:
        """`gradient` at the weights that this process holds: all of them, unless the weight is sharded."""
        return self.gradient

    def whole(self, part: Tensor) -> Tensor:
        """Return a tensor of all weights from the part of it that this process holds."""
        return part

    def part(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor of all weights that belongs to the weights of this process."""
        return whole

    @abstractmethod
    def mask(self) -> Tensor:
        """Boolean mask of the active weights, in the shape of the weight."""

    @abstractmethod
    def explored(self) -> int:
        """Number of weights that have been active at some time."""

    def digest(self) -> bytes:
        """Checksum of the active indices, to compare the masks of processes."""
        return hashlib.blake2b(pack_bits(self.mask().reshape(-1).cpu()).numpy().tobytes(), digest_size=8).digest()

    def checksum(self) -> int:
        """Sum of the bits of all values, the same in both storages and on every device."""
        bits = self.whole(self.parameter.detach()).view(BITS[self.parameter.element_size()])
        return int(bits.sum(dtype=torch.int64))

    # Choose and exchange weights

    def lowest(self, score: Tensor, count: int, among: Tensor | None = None, ordered: bool = False) -> Tensor:
        """Return the flat indices of the `count` active weights with the lowest score.

        Args:
            score: One score for each weight.
            count: Number of indices to return.
            among: Boolean vector of the active weights to choose from; all by default.
            ordered: Whether to sort the indices by score.
        """
        candidates = self.mask().reshape(-1) if among is None else among
        # An overflow becomes finite, so that only non-candidates are infinite and counts stay exact.
        finite = score.nan_to_num().masked_fill_(~candidates, torch.inf)
        if ordered or not _rounds_finely(finite):
            return finite.topk(count, largest=False, sorted=ordered).indices
        return highest(finite.neg_(), count)

    def highest(self, score: Tensor, count: int, dropped: Tensor, regrow: bool) -> Tensor:
        """Return the flat indices of the `count` inactive weights with the highest score.

        Args:
            score: One score for each weight.
            count: Number of indices to return.
            dropped: Indices that the same update drops.
            regrow: Whether dropped indices may be grown again.
        """
        taken = self.mask().reshape(-1)
        if regrow:
            taken = taken.index_fill(0, dropped, False)
        return highest(score.masked_fill(taken, -torch.inf), count)

    @abstractmethod
    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        """Drop and grow weights. Their entries become zero in the weight and in every tensor of `states`."""

    @property
    def stepped(self) -> nn.Parameter:
        """The tensor that the optimizer steps: the parameter, or a vector that the parameter is a view of."""
        return self.parameter

    def view(self, tensor: Tensor) -> Tensor:
        """The part of a tensor shaped like `stepped` that belongs to this weight."""
        return tensor

    def states(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Tensors of the optimizer's state that hold one number for each element of `parameter`."""
        for value in optimizer.state.get(self.stepped, {}).values():
            if isinstance(value, Tensor) and value.shape == self.stepped.shape:
                yield self.view(value)

    # Gradients

    @abstractmethod
    def hide_inactive(self, tensor: Tensor) -> None:
        """Set the inactive entries of a tensor shaped, and sharded, like `parameter` to exactly zero, NaN included."""

    @abstractmethod
    def record_growth(self, record: bool) -> None:
        """Start or stop recording the gradient of inactive weights.

        While recording, the gradients of all backward passes of a step are summed. The sum restarts if `.grad` was
        cleared without a step.
        """

    @property
    @abstractmethod
    def growth(self) -> Tensor | None:
        """The recorded gradient of all weights, in the shape of the weight; `None` if nothing was recorded."""

    @growth.setter
    @abstractmethod
    def growth(self, value: Tensor) -> None: ...

    # Save and load

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Shape and bitmaps of the weight, which a checkpoint stores in addition to the model."""

    @abstractmethod
    def check_state(self, state: dict[str, Tensor]) -> int:
        """Raise an error if the state belongs to another weight; return its number of active weights."""

    def _check_bitmaps(self, state: dict[str, Tensor], names: Iterable[str]) -> None:
        here = tuple(self.mask().shape)
        there = tuple(state["shape"].tolist()) if "shape" in state else None
        if there != here:
            raise UserError(f'the mask of "{self.name}" has shape {there}, the weight has {here}: the models differ')
        for name in names:
            bits = state.get(name)
            if bits is None or bits.dtype != torch.uint8 or bits.shape != (-(-self.size // 8),):
                raise UserError(f'the state of "{self.name}" has no bitmap "{name}" of {self.size} bits')

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state, after the model has been loaded."""


def highest(score: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores.

    In float64 the lowest indices win among scores that equal the lowest chosen one up to rounding. Otherwise the order
    of a sum would decide between them: the two outputs of a binary classifier have opposite gradients, for example.
    """
    chosen = score.topk(count, sorted=False).indices
    if not _rounds_finely(score) or count == 0:
        return chosen
    bound = score[chosen].min()
    slack = TIE * bound.abs()
    above, tied = ~(score <= bound + slack), (score - bound).abs() <= slack
    order = (2 * above.to(torch.int8) + tied.to(torch.int8)).sort(descending=True, stable=True).indices
    return torch.where(bound.isfinite(), order[:count], chosen)


def _rounds_finely(score: Tensor) -> bool:
    """Whether rounding is far below the distance of scores that are not equal in exact arithmetic."""
    return score.dtype == torch.float64


def is_cleared(gradient: Tensor | None) -> bool:
    """Whether a gradient is as `zero_grad` leaves it."""
    return gradient is None or (gradient.numel() > 0 and not bool(gradient.any()))
