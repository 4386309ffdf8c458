"""The sparse weights of a model in their storage: masked, packed or sharded."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.errors import UserError
from equipoise.shards import is_sharded
from equipoise.storage.flat import FlatParameters
from equipoise.storage.masked import Compile, MaskedTensor, MaskedWeight
from equipoise.storage.packed import PackedWeight
from equipoise.storage.sharded import ShardedWeight
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.attach_checks import PACKED
from equipoise.topology.initial import plan_layers, warn_about_lost
from equipoise.topology.packing import packed_weights


def sparse_weights(
    algorithm: Algorithm, model: nn.Module, flat: FlatParameters | None, compile: Compile
) -> list[SparseWeight]:
    """Return the weights that an algorithm makes sparse, with their initial masks, which are not yet applied."""
    if packed := packed_weights(algorithm, model):
        return packed
    stretches = [] if flat is None else flat.stretches
    vectors = {id(stretch): MaskedTensor(stretch, shared=True, compile=compile) for stretch in stretches}
    layers: list[SparseWeight] = []
    plan = plan_layers(algorithm, model)
    warn_about_lost(algorithm, plan, stacklevel=4)  # the caller of attach()
    for planned in plan:
        if is_sharded(planned.weight):
            layers.append(ShardedWeight(planned.name, planned.weight, planned.active, planned.final))
            continue
        masked = vectors[id(flat.stretch_of(planned.weight))] if flat is not None else None
        layers.append(MaskedWeight(planned.name, planned.weight, planned.active, planned.final, masked, flat))
    return layers


def owner_of(model: nn.Module, layer: SparseWeight) -> tuple[nn.Module, str]:
    """The module of a weight, and the name of its parameter there."""
    if isinstance(layer, PackedWeight):
        return layer.module, "values"
    path, _, leaf = layer.name.rpartition(".")
    return model.get_submodule(path), leaf


@torch.no_grad()
def sharded(layer: SparseWeight, parameter: nn.Parameter | None) -> SparseWeight:
    """The same weight after `fully_shard` has made a new parameter of it."""
    if isinstance(layer, PackedWeight):
        raise UserError(PACKED)
    if parameter is None or not is_sharded(parameter) or is_sharded(layer.parameter):
        raise UserError(f'"{layer.name}" was not sharded since the topology was attached; reattach needs fully_shard')
    moved = ShardedWeight(layer.name, parameter, layer.mask().reshape(-1).nonzero().squeeze(1), layer.final)
    moved.initial = layer.initial
    moved.load_state_dict(layer.state_dict())
    moved.memory = None if layer.memory is None else moved.part(layer.memory)
    return moved
