"""BSR-Net's rewiring: drop weights that change their sign, and refill the network to its budget.

Nothing in this module reads a value from the device, so the CPU never waits for a GPU and a CUDA graph can capture the
work. Only the device knows the number of missing connections. All tensors therefore have the size of the budget, and
writes for connections that are not missing go to an element that belongs to no weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.storage.bitmap import get_bits
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import ACTIVE, Compile, MaskedWeight
from equipoise.storage.packed import PackedWeight
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.bsr import BSRNet
from equipoise.topology.followers import Followers
from equipoise.topology.rewiring_kernels import BLOCK, choose, cross, distribute, find_new, normal

NEWBORN = 1e-12  # |w| of a new connection

States = Callable[[SparseWeight], list[Tensor]]


def make_rewiring(
    algorithm: Algorithm,
    layers: Sequence[SparseWeight],
    states: States,
    followers: Followers,
    flat: FlatParameters | None,
    compile: Compile,
) -> Rewiring | None:
    """The rewiring of BSR-Net in the storage of the weights; `None` for other algorithms."""
    if not isinstance(algorithm, BSRNet) or not layers:
        return None
    if packed := [layer for layer in layers if isinstance(layer, PackedWeight)]:
        return PackedRewiring(algorithm, packed, states)
    masked = [layer for layer in layers if isinstance(layer, MaskedWeight)]
    return MaskedRewiring(algorithm, masked, followers, flat, compile)


class Rewiring(ABC):
    """Rewires the weights of a topology after an optimizer step.

    Args:
        algorithm: BSR-Net.
        layers: The sparse weights.
    """

    def __init__(self, algorithm: BSRNet, layers: Sequence[SparseWeight]) -> None:
        self._algorithm = algorithm
        self._noise = algorithm.noise
        self.budget = sum(layer.final for layer in layers)
        device = layers[0].parameter.device
        self.generator = torch.Generator(device)
        self._bounds = torch.tensor([layer.size for layer in layers], device=device).cumsum(0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator, which cannot be copied; every step seeds it."""
        return {key: value for key, value in self.__dict__.items() if key != "generator"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator(self._bounds.device)

    def rewires(self, number: int) -> bool:
        """Whether it rewires after step `number`, counted from 0."""
        return (number + 1) % self._algorithm.rewire_every == 0

    def seed(self, number: int) -> None:
        """Seed the random numbers of step `number`."""
        self.generator.manual_seed(derive(self._algorithm.seed, "rewire", number))

    def after_step(self, number: int, rate: float | Tensor) -> None:
        """Do everything that follows the optimizer's step `number`; `rate` is the learning rate."""
        self.cross(rate, self.rewires(number))
        if self.rewires(number):
            self.refill()

    @abstractmethod
    def cross(self, rate: float | Tensor, drop: bool) -> None:
        """Add noise, and set inactive weights and weights that have crossed zero to zero.

        Args:
            rate: The learning rate.
            drop: Whether weights that have crossed zero also become inactive.
        """

    @abstractmethod
    def refill(self) -> None:
        """Grow as many connections as are missing in the whole network.

        Each missing connection picks a weight with probability proportional to its size. The inactive
        indices of a weight that gets n connections are divided into n equal intervals, and one index is drawn from
        each: every index is equally likely, none is drawn twice, and the count is exact. Connections that exceed the
        room of a weight go to the others in proportion to their room.
        """

    def recount(self) -> None:  # noqa: B027 - packed weights know their number
        """Count active weights again when a number is next needed."""

    def _draw(self) -> Tensor:
        return torch.randint(2**62, (2, self.budget), generator=self.generator, device=self._bounds.device)

    def _random_bits(self, like: Tensor) -> Tensor:
        """15 random bits for each element; a GPU draws them in a quarter of the time of normal numbers."""
        pairs = torch.empty(-(-like.numel() // 2), dtype=torch.int32, device=like.device)
        pairs.random_(generator=self.generator)  # 31 bits, the sign bit is not random
        return pairs.view(torch.int16)[: like.numel()].view(like.shape)


class MaskedRewiring(Rewiring):
    """Rewiring of masked weights.

    Args:
        algorithm: BSR-Net.
        layers: The sparse weights.
        followers: Tensors that follow the one that the optimizer steps, such as its average; new connections start at
            zero in them.
        flat: The layout of the weights if they are views of one vector.
        compile: Applied to the functions that run on the device.
    """

    def __init__(
        self,
        algorithm: BSRNet,
        layers: Sequence[MaskedWeight],
        followers: Followers,
        flat: FlatParameters | None,
        compile: Compile,
    ) -> None:
        super().__init__(algorithm, layers)
        self._layers, self._followers = list(layers), followers
        self._flat = flat if len({id(layer.masked) for layer in layers}) == 1 else None
        self._remember_signs()
        starts = [flat.start(layer.parameter) for layer in layers] if flat and self._flat else self._consecutive()
        ends = [start + layer.size for start, layer in zip(starts, layers, strict=True)]
        device = self._bounds.device
        self._starts = starts
        self._end = -(-max(ends) // BLOCK) * BLOCK
        self._first = torch.tensor([start // BLOCK for start in starts], device=device)
        self._last = torch.tensor([(end - 1) // BLOCK for end in ends], device=device)
        self._cross, self._find_new = compile(cross), compile(find_new)

    def recount(self) -> None:
        for layer in self._layers:
            layer.recount()

    def _remember_signs(self) -> None:
        """Keep the sign of every initial weight; 0 marks elements of the vector that are not sparse."""
        if self._flat is not None:
            self._signs = torch.zeros_like(self._layers[0].masked.tensor, dtype=torch.int8, requires_grad=False)
        for layer in self._layers:
            signs = torch.where(layer.parameter.detach() < 0, -1, 1).to(torch.int8)
            layer.memory = signs if self._flat is None else layer.view(self._signs).copy_(signs)

    def _consecutive(self) -> list[int]:
        starts = [0]
        for layer in self._layers:
            starts.append(starts[-1] + -(-layer.size // BLOCK) * BLOCK)
        return starts[:-1]

    def _follow_device(self) -> None:
        """Move everything to the device of the weights, which `model.to(device)` may have changed."""
        device = self._layers[0].parameter.device
        if self._bounds.device != device:
            self.generator = torch.Generator(device).manual_seed(self.generator.initial_seed())
            self._bounds, self._first, self._last = (
                each.to(device) for each in (self._bounds, self._first, self._last)
            )
            for layer in self._layers:
                layer.follow_device()

    @torch.no_grad()
    def cross(self, rate: float | Tensor, drop: bool) -> None:
        self._follow_device()
        scale = rate * self._noise
        if self._flat is not None:
            masked = self._layers[0].masked
            bits = self._random_bits(masked.tensor) if self._noise else None
            self._cross(masked.tensor.data, masked.activity, self._signs, bits, scale, drop)
            return
        for layer in self._layers:
            if layer.parameter.requires_grad:
                bits = self._random_bits(layer.parameter) if self._noise else None
                self._cross(layer.parameter.detach(), layer.activity, layer.memory, bits, scale, drop)

    @torch.no_grad()
    def refill(self) -> None:
        activity = self._activity()
        flags = [layer.parameter.requires_grad for layer in self._layers]
        trained = None if all(flags) else torch.tensor(flags, device=activity.device)
        index, wanted = self._find_new(
            activity, self._end, self._first, self._last, self.budget, trained, self._draw(), self._bounds
        )
        self._grow(activity, index, wanted)

    def _activity(self) -> Tensor:
        """The activity of all weights in one vector, whose last element belongs to no weight."""
        if self._flat is not None:
            return self._layers[0].masked.activity
        vector = torch.full((self._end + BLOCK,), ACTIVE, dtype=torch.int8, device=self._bounds.device)
        for layer, start in zip(self._layers, self._starts, strict=True):
            vector[start : start + layer.size].view(layer.activity.shape).copy_(layer.activity)
        return vector

    def _grow(self, activity: Tensor, index: Tensor, wanted: Tensor) -> None:
        """Activate the elements at `index`; indices that are not wanted point to the last element."""
        if self._flat is not None:
            weights = self._layers[0].masked.tensor.data
            weights[index] = self._signs[index].to(weights.dtype) * NEWBORN
            activity[index] = torch.where(wanted, ACTIVE, activity[index]).to(torch.int8)
            for tensor in self._followers.of(self._layers[0].masked.tensor):
                tensor.index_fill_(0, index, 0)
            return
        newborn = torch.zeros_like(activity, dtype=torch.bool).index_fill_(0, index, True)
        for layer, start in zip(self._layers, self._starts, strict=True):
            born = newborn[start : start + layer.size].view(layer.activity.shape)
            weight = layer.parameter.detach()
            assert layer.memory is not None
            weight.copy_(torch.where(born, layer.memory.to(weight.dtype) * NEWBORN, weight))
            layer.activity.masked_fill_(born, ACTIVE)
            for tensor in self._followers.of(layer.parameter):
                tensor.masked_fill_(born, 0)


class PackedRewiring(Rewiring):
    """Rewiring of packed weights, whose memory holds one sign bit for each weight.

    Args:
        algorithm: BSR-Net.
        layers: The sparse weights.
        states: Tensors that hold one number for each active weight; new connections start at zero in them.
    """

    def __init__(self, algorithm: BSRNet, layers: Sequence[PackedWeight], states: States) -> None:
        super().__init__(algorithm, layers)
        for layer in layers:
            if layer.memory is None:
                raise UserError(
                    f'"{layer.name}" was packed without the signs of its weights; use pack(model, BSRNet(...))'
                )
        self._layers, self._states = list(layers), states
        self._crossed: list[Tensor] = []

    @torch.no_grad()
    def cross(self, rate: float | Tensor, drop: bool) -> None:
        self._crossed = []
        for layer in self._layers:
            values = layer.parameter.detach()
            crossed = torch.zeros(layer.active, dtype=torch.bool)
            if layer.parameter.requires_grad:
                if self._noise:
                    values += normal(self._random_bits(values)).to(values.dtype) * (rate * self._noise)
                crossed = values * self._signs(layer, layer.index) <= 0
                values.masked_fill_(crossed, 0)
            self._crossed.append(crossed)

    def _signs(self, layer: PackedWeight, index: Tensor) -> Tensor:
        assert layer.memory is not None
        return get_bits(layer.memory, layer.size, index).float() * 2 - 1

    @torch.no_grad()
    def refill(self) -> None:
        kept = [~crossed for crossed in self._crossed]
        left = torch.tensor([int(flags.sum()) for flags in kept])
        room = torch.tensor([layer.size for layer in self._layers]) - left
        trained = torch.tensor([layer.parameter.requires_grad for layer in self._layers])
        missing, drawn = self.budget - left.sum(), self._draw()
        counts = distribute(missing, room * trained, drawn[0], self._bounds)
        ranks, _ = choose(missing, counts, room, torch.zeros_like(room), drawn[1])
        parts = ranks[: int(counts.sum())].split(counts.tolist())
        for layer, flags, own in zip(self._layers, kept, parts, strict=True):
            if len(own) or not bool(flags.all()):
                index = layer.index[flags]
                # before the j-th active index, index[j] - j indices are inactive
                skipped = torch.searchsorted(index - torch.arange(len(index)), own.long(), right=True)
                grown = (own.long() + skipped).to(torch.int32)
                layer.replace(flags, grown, NEWBORN * self._signs(layer, grown), self._states(layer))
