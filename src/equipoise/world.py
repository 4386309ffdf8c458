"""The processes that train one model together, and the collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.shards import is_sharded

T = TypeVar("T")


class World:
    """This process and its peers. In a single process every collective returns its argument at no cost.

    All processes call every method except `raise_flag` in the same order. The results of `all_reduce` and
    `all_reduce_mean` are bit-identical on all processes.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        device: Device of the tensors that the backend can send.
        group: The process group; `None` for the default one.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str | torch.device = "cpu", group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._group = group
        self._raised = False
        # On the device, at fixed addresses: a CUDA graph may hold the all-reduce.
        self._own_flag: Tensor | None = None
        self._mean_flag: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module) -> World:
        """Return the processes of a `DistributedDataParallel` or sharded model; `ALONE` for any other model."""
        wrapper = data_parallel(model)
        sharded: Any = next((p for p in model.parameters() if is_sharded(p)), None)
        if wrapper is not None:
            group, device = wrapper.process_group, next(wrapper.parameters()).device
        elif sharded is not None:
            mesh, device = sharded.device_mesh, torch.device(sharded.device_mesh.device_type)
            group = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
        else:
            return ALONE
        return cls(dist.get_rank(group), dist.get_world_size(group), device, group)

    def __deepcopy__(self, _: Any) -> World:
        return self  # connections cannot be copied

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints for all."""
        return self.rank == 0

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the collectives: only nccl launches nothing but work on the device."""
        return self.alone or dist.get_backend(self._group) == "nccl"

    def raise_flag(self) -> None:
        """Set `flag` on every process from the next `all_reduce_mean` on. One process can ask all to stop."""
        self._raised = True
        if self._own_flag is not None:
            self._own_flag.fill_(1)

    @property
    def flag(self) -> bool:
        """Whether any process had raised its flag before the last `all_reduce_mean`. Waits for a GPU."""
        return self._mean_flag is not None and bool(self._mean_flag > 0)

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over the processes, by one all-reduce of one bucket."""
        if self.alone:
            return list(tensors)
        dtype = max((t.dtype for t in tensors), key=lambda d: torch.finfo(d).bits)
        if self._own_flag is None or self._mean_flag is None:
            self._own_flag = torch.full((1,), float(self._raised), device=self.device)
            self._mean_flag = torch.zeros_like(self._own_flag)
        parts = [tensor.detach().reshape(-1).to(self.device, dtype) for tensor in (*tensors, self._own_flag)]
        bucket = torch.cat(parts)
        self._communicate(lambda: dist.all_reduce(bucket, group=self._group))
        bucket /= self.size
        *means, flag = bucket.split([len(part) for part in parts])
        self._mean_flag.copy_(flag)
        return [mean.view(tensor.shape).to(tensor) for mean, tensor in zip(means, tensors, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of the first process."""
        for tensor in () if self.alone else tensors:
            self._communicate(partial(dist.broadcast, tensor.detach(), self._first, group=self._group))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        if self.alone:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        self._communicate(lambda: dist.all_reduce(total, group=self._group))
        return total.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes, stacked by rank."""
        if self.alone:
            return tensor.unsqueeze(0)
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._communicate(lambda: dist.all_gather(found, tensor.contiguous(), group=self._group))
        return torch.stack(found)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        self._communicate(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def gather_object(self, value: T) -> list[T]:
        """Return the values of all processes, by rank, on the first process and an empty list on the others."""
        if self.alone:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        self._communicate(lambda: dist.gather_object(value, found, self._first, group=self._group))
        return found or []

    def broadcast_object(self, value: T) -> T:
        """Return the value of the first process."""
        if self.alone:
            return value
        box = [value]
        self._communicate(lambda: dist.broadcast_object_list(box, self._first, group=self._group, device=self.device))
        return box[0]

    def all(self, holds: bool) -> bool:
        """Return whether `holds` is true on every process."""
        return all(self.all_gather_object(holds))

    @property
    def _first(self) -> int:
        """Global rank of the first process of the group."""
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def _communicate(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            if torch.cuda.is_current_stream_capturing():
                raise  # the engine gives capturing up
            line = " ".join(str(error).split())[:200]
            raise UserError(f"another of the {self.size} processes has ended or does not respond: {line}") from None


ALONE = World()


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the `DistributedDataParallel` wrapper of a model, which `torch.compile` may have wrapped in turn."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model
    compiled = getattr(model, "_orig_mod", None)
    return data_parallel(compiled) if isinstance(compiled, nn.Module) else None


@contextmanager
def by_itself(model: nn.Module, live: bool = False) -> Iterator[None]:
    """Run a pass after which `DistributedDataParallel` does not average gradients.

    Args:
        model: The model, with or without the wrapper.
        live: Whether the pass is at the live weights: the wrapper then synchronises the buffers first. Another pass
            does not, and the next pass of the caller synchronises them as it would have.
    """
    wrapper = data_parallel(model)
    if wrapper is None:
        yield
        return
    before, wrapper.require_forward_param_sync = wrapper.require_forward_param_sync, live
    with wrapper.no_sync():
        yield
    if not live:
        wrapper.require_forward_param_sync = before
