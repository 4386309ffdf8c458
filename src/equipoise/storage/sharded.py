"""Sharded storage: a masked weight of which each process holds a part (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from equipoise.shards import gather, local, share
from equipoise.storage.masked import ACTIVE, GrowthRecorder, MaskedWeight


class ShardedWeight(MaskedWeight):
    """A masked weight whose parameter is a `DTensor`.

    Values, mask, recorded gradients and memory are sharded. `weight`, `gradient` and `mask` gather the whole weight, so
    that every process chooses the same weights as one process that has it all. They communicate: all processes use them
    together.
    """

    def __init__(self, name: str, parameter: nn.Parameter, active: Tensor, final: int) -> None:
        super().__init__(name, parameter, active, final)
        self.growth_recorder = ShardedGrowthRecorder(self)
        self._choice = b""

    def whole(self, part: Tensor) -> Tensor:
        return gather(part, self.parameter)

    def part(self, whole: Tensor) -> Tensor:
        return share(whole, self.parameter)

    @property
    def local_gradient(self) -> Tensor | None:
        found = self.parameter.grad if self.growth is None else self.growth
        return None if found is None else local(found).reshape(-1)

    def rewire(self, dropped: Tensor, grown: Tensor, states: Iterable[Tensor]) -> None:
        super().rewire(dropped, grown, states)
        choice = torch.cat([dropped.sort().values, grown.sort().values]).cpu()
        self._choice = hashlib.blake2b(choice.numpy().tobytes(), key=self._choice, digest_size=8).digest()

    def digest(self) -> bytes:
        """Checksum of all choices so far: each process holds another part of the mask."""
        return self._choice


class ShardedGrowthRecorder(GrowthRecorder):
    """Sums the gradient of all entries of a sharded weight over the backward passes of a step.

    `fully_shard` averages gradients over the processes and calls a hook after it has added them to `.grad`, none
    before. At inactive weights `.grad` was zero and now holds the gradient of the last pass. The sum restarts if
    `.grad` is another tensor than before; `zero_grad(set_to_none=False)` without a step is not noticed.
    """

    def __init__(self, weight: ShardedWeight) -> None:
        super().__init__(weight.parameter)
        self._weight = weight

    def clear(self) -> None:
        super().clear()
        self._seen: Tensor | None = None

    def before_accumulation(self, gradient: Tensor) -> None:
        """Do nothing."""

    def after_accumulation(self) -> None:
        gradient = self._parameter.grad
        if not self.record or gradient is None:
            return
        total = local(gradient).clone()
        if self.total is not None and self._seen is gradient:
            total += self.total.masked_fill(self._weight.activity == ACTIVE, 0)
        self.total, self._seen = total, gradient
