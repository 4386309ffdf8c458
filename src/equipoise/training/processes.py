"""The processes that torchrun starts, and the part of a run's state that differs between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.correction.state import copy_state
from equipoise.errors import UserError
from equipoise.objectives.norm_ball import SharedGenerator
from equipoise.world import ALONE, World

# Keys whose values differ between processes, in the states of a run and of its correction
OWN = ("meter", "random")
OWN_CORRECTION = ("mode", "loss_pairs")


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Join the processes that torchrun has started, for the duration of the block; yield `ALONE` without them.

    Args:
        device: Device of the recipe. Each process on GPUs uses a different GPU, and they communicate over nccl;
            processes on CPUs communicate over gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    local = own_device(device)
    if local.type == "cuda":
        torch.cuda.set_device(local)
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    # torchrun keeps the store across restarts: without a prefix, processes would read addresses of dead ones
    store = dist.PrefixStore(f"attempt {_attempt()}", store)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if local.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    yield World(rank, size, local)
    dist.barrier()  # no process leaves while another still communicates
    dist.destroy_process_group()  # skipped after an error: the others may still wait, and torchrun ends them


def restarted() -> bool:
    """Whether torchrun has restarted the processes after one of them died."""
    return _attempt() != "0"


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def own_device(name: str) -> torch.device:
    """Return the device of this process: a GPU that no other process uses, or the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name}: several processes use one GPU each; use device=auto, cuda or cpu")
    gpus = torch.cuda.device_count() if name != "cpu" else 0
    if not gpus and name == "cuda":
        raise UserError("device=cuda, but torch finds no GPU; use device=cpu")
    if not gpus:
        return torch.device("cpu")
    here, number = (int(os.environ.get(key, "0")) for key in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if here > gpus:
        raise UserError(
            f"{here} processes and {gpus} GPUs on this machine; use --nproc-per-node={gpus} or device=cpu"
        )
    return torch.device("cuda", number)


def own_generator(world: World, device: torch.device, images: int) -> torch.Generator:
    """Return a generator whose draws for a batch are those that a single process would make for the same images.

    Args:
        world: The processes.
        device: Device of the generator.
        images: Number of images of the batch, over all processes.
    """
    if world.alone:
        return torch.Generator(device)
    return SharedGenerator(device, world.rank, world.size, images)


def local_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's state that differs between processes."""
    own = {key: state[key] for key in OWN}
    return local_correction(state["correction"]) | copy_state(own, torch.device("cpu"))


def local_correction(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a correction's state that differs between processes."""
    return dict(copy_state({key: state[key] for key in OWN_CORRECTION}, torch.device("cpu")))


def state_for_process(state: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the part of a saved state from which this process continues.

    If the saved run had the same number of processes, each takes its own part and the run is bit-identical. If it
    differs, every process takes the mean of the parts, which leaves the mean over the processes unchanged, and the
    first process takes the sums of the meters.

    Args:
        state: The saved state.
        world: The processes of this run.
    """
    others = state.get("others", [])
    if world.alone and not others:
        return state
    parts = [local_part(state), *others]
    own = parts[world.rank % len(parts)]
    if len(parts) != world.size:
        own["meter"] = _total([part["meter"] for part in parts], world.leads)
    correction = correction_for_process(state["correction"], others, world)
    return {**state, "correction": correction, **{key: own[key] for key in OWN}}


def correction_for_process(state: dict[str, Any], others: list[dict[str, Any]], world: World) -> dict[str, Any]:
    """Return the state of a correction from which this process continues.

    Args:
        state: The state that the first process has saved.
        others: What `local_correction` returned on the other processes.
        world: The processes of this run.
    """
    parts = [local_correction(state), *others]
    if len(parts) == world.size:
        own = parts[world.rank]
    else:
        own = {key: _mean([part[key] for part in parts]) for key in OWN_CORRECTION}
    return {**state, **{key: own[key] for key in OWN_CORRECTION}}


def _mean(values: list[Any]) -> Any:
    """Average the floating-point tensors of nested containers; all other values are those of the first."""
    first = values[0]
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack(values).mean(0)
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(items)) for items in zip(*values, strict=True))
    return first


def _total(meters: list[dict[str, Any]], leads: bool) -> dict[str, Any]:
    """Sum loss, correct predictions and images, on the first process only; batches and first bad batch are on all."""
    sums = torch.stack([meter["sums"] for meter in meters])
    return {"sums": torch.cat([sums[:, :3].sum(0) * leads, sums[:, 3:].amin(0)])}
