"""Moving a checkpoint from masked storage to packed and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.storage.bitmap import get_bits, pack_bits
from equipoise.storage.masked import ACTIVE, DROPPED
from equipoise.storage.packed_modules import PackedLayer

Shapes = Mapping[str, tuple[int, ...]]  # of the sparse weights, by their names in the unpacked model
State = dict[str, Any]


def plain_names(model: nn.Module) -> dict[int, str]:
    """The name that each parameter has in the unpacked model, by its identity."""
    packed = {id(module.values) for module in model.modules() if isinstance(module, PackedLayer)}
    named = model.named_parameters()
    return {id(p): f"{name.removesuffix('values')}weight" if id(p) in packed else name for name, p in named}


def in_storage(state: State, storage: str, shapes: Shapes) -> State:
    """The state of a run as one in the other storage would have saved it.

    Active vectors of a correction are the same in both. What packed storage does not have is zero
    after the way back: the momentum that BSR-Net leaves at inactive places.
    """
    if state["storage"] == storage:
        return state
    return _masked(state, shapes) if storage == "masked" else _packed(state, shapes)


def _masked(state: State, shapes: Shapes) -> State:
    index = {name: state["model"][_key(name, "index")] for name in shapes}
    topology = dict(state["topology"])
    topology["places"] = {
        name: _places(index[name], bits, shapes[name]) for name, bits in state["topology"]["places"].items()
    }
    topology["memory"] = {
        name: (get_bits(memory, math.prod(shapes[name])).to(torch.int8) * 2 - 1).view(shapes[name])
        if memory.dtype == torch.uint8
        else memory
        for name, memory in state["topology"]["memory"].items()
    }
    return {
        **state,
        "storage": "masked",
        "model": _dense_tensors(state["model"], shapes),
        "optimizer": _optimizer(state, lambda name, t: _spread(t, index[name], shapes[name]), index),
        "average": _average(state, lambda values: _dense_tensors(values, shapes, index)),
        "topology": topology,
        "correction": {
            **state["correction"],
            "snapshot": _dense_tensors(state["correction"]["snapshot"], shapes),
        },
    }


def _packed(state: State, shapes: Shapes) -> State:
    places = state["topology"]["places"]
    index = {name: (places[name].reshape(-1) == ACTIVE).nonzero().flatten().to(torch.int32) for name in shapes}
    topology = dict(state["topology"])
    topology["places"] = {name: pack_bits(tensor.reshape(-1) != 0) for name, tensor in places.items()}
    topology["memory"] = {
        name: pack_bits(memory.reshape(-1) > 0) if memory.dtype == torch.int8 else memory
        for name, memory in state["topology"]["memory"].items()
    }
    correction = state["correction"]
    return {
        **state,
        "storage": "packed",
        "model": _vectors(state["model"], index),
        "optimizer": _optimizer(state, lambda name, t: t.reshape(-1)[index[name].long()], index),
        "average": _average(state, lambda values: _vectors(values, index, with_index=False)),
        "topology": topology,
        "correction": {**correction, "snapshot": _vectors(correction["snapshot"], _snapshot_index(state, shapes))},
    }


def _key(name: str, leaf: str) -> str:
    return name.removesuffix("weight") + leaf


def _spread(values: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.new_zeros(math.prod(shape)).index_copy_(0, index.long(), values).view(shape)


def _places(index: Tensor, explored: Tensor, shape: tuple[int, ...]) -> Tensor:
    places = get_bits(explored, math.prod(shape)).to(torch.int8) * DROPPED
    return places.index_fill_(0, index.long(), ACTIVE).view(shape)


def _dense_tensors(
    tensors: Mapping[str, Tensor], shapes: Shapes, index: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """With the dense weight in the place of each vector, whose index is among the tensors or given."""
    result = dict(tensors)
    for name, shape in shapes.items() if tensors else ():
        values = result.pop(_key(name, "values"))
        own = result.pop(_key(name, "index")) if index is None else index[name]
        result[name] = _spread(values, own, shape)
    return result


def _vectors(
    tensors: Mapping[str, Tensor], index: Mapping[str, Tensor], with_index: bool = True
) -> dict[str, Tensor]:
    result = dict(tensors)
    for name, own in index.items() if tensors else ():
        result[_key(name, "values")] = result.pop(name).reshape(-1)[own.long()]
        if with_index:
            result[_key(name, "index")] = own
    return result


def _optimizer(state: State, convert: Any, sparse: Mapping[str, Tensor]) -> State:
    """Every tensor that has one number per weight."""
    optimizer, names = state["optimizer"], state["names"]["optimizer"]
    length = {name: len(index) for name, index in sparse.items()}

    def converted(number: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        name = names[number]
        if name not in sparse:
            return dict(tensors)
        return {
            key: convert(name, t) if isinstance(t, Tensor) and (t.dim() > 1 or t.shape == (length[name],)) else t
            for key, t in tensors.items()
        }

    return {**optimizer, "state": {i: converted(int(i), tensors) for i, tensors in optimizer["state"].items()}}


def _average(state: State, convert: Any) -> State | None:
    average = state["average"]
    return None if average is None else {**average, "values": convert(average["values"])}


def _snapshot_index(state: State, shapes: Shapes) -> dict[str, Tensor]:
    """Where the snapshot was active: its active vector knows; without any, where it is not zero."""
    snapshot, vector = state["correction"]["snapshot"], state["correction"]["active_vector"]
    if not snapshot:
        return {}
    known = {} if vector is None else dict(zip(state["names"]["model"], vector["indices"], strict=True))
    result = {}
    for name, shape in shapes.items():
        weight = snapshot[name].reshape(-1)
        index = known.get(name, weight.nonzero().flatten())
        result[name] = (torch.arange(math.prod(shape)) if index is None else index).to(torch.int32)
    return result
