"""Save and load the masks, counters and memory of a topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm, Dynamic
from equipoise.topology.bsr import BSRNet
from equipoise.topology.hydra import Hydra

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology


def state_of(topology: Topology) -> dict[str, Any]:
    """Return masks, exploration and counters, and checksums of the weights that belong to them."""
    layers = topology.layers
    return {
        "algorithm": type(topology.algorithm).__name__,
        "steps": topology.steps,
        "updates": topology.updates,
        "layers": {layer.name: layer.state_dict() for layer in layers},
        "memory": _memories(topology),
        "checksums": {layer.name: layer.checksum() for layer in layers},
    }


def _memories(topology: Topology) -> dict[str, Tensor]:
    """Return the memory of the algorithm for whole weights.

    SNFS that has seen no gradient has zeros: torch.distributed.checkpoint loads only what a state already has.
    """
    found = {layer.name: layer.whole(layer.memory) for layer in topology.layers if layer.memory is not None}
    for layer in topology.layers if topology.algorithm.dense_gradient == "always" else ():
        if layer.memory is None:
            found[layer.name] = torch.zeros(layer.size, dtype=layer.parameter.dtype)
    return found


@torch.no_grad()
def load_state(topology: Topology, state: Mapping[str, Any]) -> None:
    """Load the masks, counters and memory of a state that `check_state` has accepted."""
    topology.steps, topology.updates = state["steps"], state["updates"]
    for layer in topology.layers:
        layer.load_state_dict(state["layers"][layer.name])
        _load_memory(topology, layer, state["memory"].get(layer.name))


def _load_memory(topology: Topology, layer: SparseWeight, memory: Tensor | None) -> None:
    if memory is None:
        layer.memory = None
    elif layer.memory is not None and topology.changes_every_step:  # BSR-Net's signs are views of one vector
        layer.memory.copy_(layer.part(memory))
    elif topology.algorithm.dense_gradient == "always" and not memory.any():
        layer.memory = None
    else:
        layer.memory = layer.part(memory).to(layer.parameter.device, copy=True)


def verify_checksums(topology: Topology, checksums: Mapping[str, int]) -> None:
    """Raise an error if the weights are not those that a loaded state belongs to."""
    for layer in topology.layers if checksums else ():
        if layer.checksum() != checksums[layer.name]:
            raise UserError(
                f'"{layer.name}" does not have the values of the loaded topology; '
                "load the model, the optimizer and the topology of one checkpoint, after attaching"
            )


def check_state(topology: Topology, state: Mapping[str, Any]) -> None:
    """Refuse a wrong state before anything is changed."""
    if missing := {"algorithm", "steps", "updates", "layers", "memory"} - set(state):
        raise UserError(f'this is not the state of a topology: it has no "{min(missing)}"')
    kind = type(topology.algorithm).__name__
    if state["algorithm"] != kind:
        raise UserError(f"the state is of {state['algorithm']}, this topology is {kind}")
    if differing := set(state["layers"]) ^ {layer.name for layer in topology.layers}:
        raise UserError(f'the state has other sparse weights than the model, such as "{min(differing)}"')
    counts = {layer.name: layer.check_state(state["layers"][layer.name]) for layer in topology.layers}
    if _keeps_counts(topology):
        _check_counts(topology, counts)
    _check_memory(topology, state["memory"])


def _check_memory(topology: Topology, memory: Mapping[str, Tensor]) -> None:
    """Refuse what an algorithm has kept for a weight of another shape."""
    for layer in topology.layers:
        if layer.name not in memory:
            continue
        shape = tuple(layer.mask().shape)
        fitting: list[tuple[int, ...]] = [(layer.size,), shape]
        if isinstance(topology.algorithm, Hydra):
            fitting = [(2, *shape)]  # frozen weights and scores
        if layer.memory is not None:
            fitting = [tuple(layer.whole(layer.memory).shape)]
        if (there := tuple(memory[layer.name].shape)) not in fitting:
            kind = type(topology.algorithm).__name__
            raise UserError(f'the state of {kind} for "{layer.name}" has the shape {there} instead of {fitting[0]}')


def _keeps_counts(topology: Topology) -> bool:
    """Whether every layer has the same number of active weights from the first step to the last."""
    kind = type(topology.algorithm)
    if issubclass(kind, Dynamic):
        steady = kind.target is Dynamic.target and kind.choose is Dynamic.choose
    else:
        steady = kind.window is Algorithm.window and not issubclass(kind, BSRNet)
    return steady and all(layer.initial == layer.final for layer in topology.layers)


def _check_counts(topology: Topology, counts: Mapping[str, int]) -> None:
    """Refuse a state of another sparsity."""
    for layer in topology.layers:
        if counts[layer.name] != layer.final:
            raise UserError(
                f'the state has {counts[layer.name]} active weights in "{layer.name}", this topology {layer.final}: '
                "attach with the sparsity and distribution of the run that was saved"
            )
