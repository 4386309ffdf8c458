"""Joining the processes that torchrun has started, and what is told apart by process in a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.correction.state import copy_state
from equipoise.errors import UserError
from equipoise.objectives import Objective
from equipoise.objectives.ball import SharedGenerator
from equipoise.world import ALONE, World

OWN = ("meter", "random")  # what each process has of its own, beside shares of the correction's state
SHARES = ("mode", "loss_pairs")  # the parts of the correction's state that differ between processes


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The processes that train together, for the time of the block: those of torchrun, or this one alone.

    device: as a recipe names it. GPUs talk over nccl and each process has its own; CPUs talk over gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    place = own_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    # torchrun keeps the store over a restart: without a prefix the addresses of the dead would be found in it
    store = dist.PrefixStore(f"attempt {_attempt()}", store)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    yield World(rank, size, place)
    dist.barrier()  # none leaves while another still talks
    dist.destroy_process_group()  # not after an error: the others may wait for an answer, and torchrun ends them


def restarted() -> bool:
    """Whether torchrun has started these processes again, after one of them had died."""
    return _attempt() != "0"


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def own_device(name: str) -> torch.device:
    """Where this one of the processes of a machine computes: on a GPU of its own, or on the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name}: several processes take a GPU each; use device=auto, cuda or cpu")
    gpus = torch.cuda.device_count() if name != "cpu" else 0
    if not gpus and name == "cuda":
        raise UserError("device=cuda, but torch finds no GPU here; use device=cpu")
    if not gpus:
        return torch.device("cpu")
    here, number = (int(os.environ.get(key, "0")) for key in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if here > gpus:
        raise UserError(
            f"{here} processes and {gpus} GPUs on this machine; use --nproc-per-node={gpus} or device=cpu"
        )
    return torch.device("cuda", number)


def weighed(world: World, batch: tuple[Tensor, ...], images: int) -> tuple[Tensor, ...]:
    """This process's part of a batch of so many images, and behind it the weight of its loss: the mean over the
    processes of the losses so weighed is the loss of the whole batch."""
    if world.alone:
        return batch
    return (*batch, torch.tensor(world.size * len(batch[1]) / images, dtype=torch.float64))


def weighed_loss(
    world: World, objective: Objective, model: nn.Module, batch: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The loss of such a batch, and the logits."""
    if world.alone:
        return objective.loss(model, *batch)
    *own, weight = batch
    loss, logits = objective.loss(model, *own)
    return loss * weight, logits


def own_generator(world: World, device: torch.device, images: int) -> torch.Generator:
    """What draws for this process's part of a batch of so many images."""
    if world.alone:
        return torch.Generator(device)
    generator = SharedGenerator(device)
    generator.rank, generator.ranks, generator.images = world.rank, world.size, images
    return generator


def local_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a state is a process's own: its shares of old gradients and losses, its counts, its random numbers."""
    correction = state["correction"]
    own = {**{key: correction[key] for key in SHARES}, **{key: state[key] for key in OWN}}
    return dict(copy_state(own, torch.device("cpu")))


def taken_up(state: dict[str, Any], world: World) -> dict[str, Any]:
    """A saved state as this process goes on with it.

    With as many processes as wrote it each takes its own part, and they go on bit for bit. With more or fewer every
    one takes the mean of the shares, of which the mean over the new processes is the same again, and the first one
    the counts.
    """
    if world.alone and not state.get("others"):
        return state
    parts = [local_part(state), *state.get("others", [])]
    own = parts[world.rank % len(parts)]
    if len(parts) != world.size:
        own |= {key: _mean([part[key] for part in parts]) for key in SHARES}
        own["meter"] = _total([part["meter"] for part in parts], world.leads)
    correction = {**state["correction"], **{key: own[key] for key in SHARES}}
    return {**state, "correction": correction, **{key: own[key] for key in OWN}}


def _mean(values: list[Any]) -> Any:
    """Nested containers alike, with the mean of their floating-point tensors and all else as in the first."""
    first = values[0]
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack(values).mean(0)
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(items)) for items in zip(*values, strict=True))
    return first


def _total(meters: list[dict[str, Any]], leads: bool) -> dict[str, Any]:
    sums = torch.stack([meter["sums"] for meter in meters])
    return {"sums": torch.cat([sums[:, :3].sum(0) * leads, sums[:, 3:].amin(0)])}
