"""The processes that train one model together: what they average, and what they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.errors import UserError

T = TypeVar("T")


class World:
    """This process among `size` others; alone, everything here returns what it was given and costs nothing.

    Every method but `raise_flag` is called by all processes in the same order. Averages are equal to the bit on all
    of them, since each number of an all-reduce is added up in one place.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str | torch.device = "cpu", group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)  # where tensors are that the backend can send
        self._group = group
        self._raised = False
        self._flags: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module) -> World:
        """The processes that a model is wrapped for by DistributedDataParallel; alone where it is not."""
        wrapper = data_parallel(model)
        if wrapper is None:
            return ALONE
        group, device = wrapper.process_group, next(wrapper.parameters()).device
        return cls(dist.get_rank(group), dist.get_world_size(group), device, group)

    def __deepcopy__(self, _: Any) -> World:
        return self  # connections cannot be copied

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def raise_flag(self) -> None:
        """From the next average on, `flag` is set on every process: any one of them can ask all to stop."""
        self._raised = True

    @property
    def flag(self) -> bool:
        """Whether any process had raised its flag before the last average; a GPU has to be waited for."""
        return self._flags is not None and bool(self._flags > 0)

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean of each tensor over the processes, in one all-reduce of one bucket."""
        if self.alone:
            return list(tensors)
        dtype = max((t.dtype for t in tensors), key=lambda d: torch.finfo(d).bits)
        flag = torch.full((1,), float(self._raised), device=self.device)
        parts = [tensor.detach().reshape(-1).to(self.device, dtype) for tensor in (*tensors, flag)]
        bucket = torch.cat(parts)
        self._answered(lambda: dist.all_reduce(bucket, group=self._group))
        bucket /= self.size
        *means, self._flags = bucket.split([len(part) for part in parts])
        return [mean.view(tensor.shape).to(tensor) for mean, tensor in zip(means, tensors, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Make the tensors those of the first process, in place."""
        for tensor in () if self.alone else tensors:
            self._answered(partial(dist.broadcast, tensor.detach(), self._first, group=self._group))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.alone:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        self._answered(lambda: dist.all_reduce(total, group=self._group))
        return total.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, by rank."""
        if self.alone:
            return tensor.unsqueeze(0)
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._answered(lambda: dist.all_gather(found, tensor.contiguous(), group=self._group))
        return torch.stack(found)

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all processes, by rank, on every one of them."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        self._answered(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def gather_object(self, value: T) -> list[T]:
        """The values of all processes, by rank, on the first one; nothing on the others."""
        if self.alone:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        self._answered(lambda: dist.gather_object(value, found, self._first, group=self._group))
        return found or []

    def broadcast_object(self, value: T) -> T:
        """What the first process has."""
        if self.alone:
            return value
        box = [value]
        self._answered(lambda: dist.broadcast_object_list(box, self._first, group=self._group, device=self.device))
        return box[0]

    @property
    def _first(self) -> int:
        """The first process, as the backend numbers it."""
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def all(self, holds: bool) -> bool:
        """Whether it holds for every process."""
        return all(self.all_gather_object(holds))

    def _answered(self, ask: Callable[[], object]) -> None:
        try:
            ask()
        except RuntimeError as error:
            line = " ".join(str(error).split())[:200]
            raise UserError(f"another of the {self.size} processes has ended or gone astray: {line}") from None


ALONE = World()


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel around a model, below `torch.compile` too."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model
    compiled = getattr(model, "_orig_mod", None)
    return data_parallel(compiled) if isinstance(compiled, nn.Module) else None


def by_itself(model: nn.Module, live: bool = False) -> AbstractContextManager[None]:
    """Around passes of one process: DistributedDataParallel must not average gradients that are not final.

    live: it shall share the buffers as ever, which it would leave off after a pass like this.
    """
    wrapper = data_parallel(model)
    if wrapper is None:
        return nullcontext()
    wrapper.require_forward_param_sync = wrapper.require_forward_param_sync or live
    return wrapper.no_sync()
