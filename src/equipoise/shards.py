"""Tensors of which each process holds a part, as `fully_shard` leaves the parameters of a model (FSDP2)."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether a tensor is a `DTensor`. Does not import the class, which takes seconds: there is none before."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this process holds, as a view; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def gather(part: Tensor, like: Any) -> Tensor:
    """Return the whole of a tensor that is sharded like another one. All processes call this together.

    Args:
        part: The sharded tensor, or the part of it that this process holds. A flat part gives a flat tensor.
        like: A sharded tensor of the same shape.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(part, DTensor):
        return part.full_tensor()
    shaped = part.reshape(local(like).shape)
    sharded = DTensor.from_local(
        shaped, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    whole: Tensor = sharded.full_tensor()
    return whole.reshape(-1) if part.dim() == 1 else whole


def share(tensor: Tensor, like: Any) -> Tensor:
    """Return the part of a whole tensor that this process would hold if it were sharded like another one.

    Nothing is communicated: every process has the whole tensor.

    Args:
        tensor: The whole tensor. A flat tensor gives a flat part.
        like: A sharded tensor with as many elements.
    """
    from torch.distributed.tensor import distribute_tensor

    shaped = tensor.detach().reshape(like.shape)
    part = local(distribute_tensor(shaped, like.device_mesh, like.placements, src_data_rank=None))
    return part.reshape(-1) if tensor.dim() == 1 else part


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that `fully_shard` keeps after a forward pass; the next pass gathers them again."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
