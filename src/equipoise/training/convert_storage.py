"""Convert the state of a run between masked and packed storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.storage.bitmap import get_bits, pack_bits
from equipoise.storage.packed_modules import named_layers

Shapes = Mapping[str, tuple[int, ...]]  # of the sparse weights, by their names in the unpacked model
State = dict[str, Any]


def plain_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter in the unpacked model, by `id`."""
    packed = {id(layer.values): name for name, layer in named_layers(model).items()}
    return {id(parameter): packed.get(id(parameter), name) for name, parameter in model.named_parameters()}


def in_storage(state: State, storage: str, shapes: Shapes) -> State:
    """Return the state of a run as a run in the given storage would have saved it.

    Active vectors of a correction are the same in both storages. The momentum that BSR-Net leaves at inactive weights
    exists in masked storage only. It is zero after a conversion to packed storage and back.

    Args:
        state: The state of a run.
        storage: `masked` or `packed`.
        shapes: Shapes of the sparse weights.
    """
    if state["storage"] == storage:
        return state
    return _masked(state, shapes) if storage == "masked" else _packed(state, shapes)


def _masked(state: State, shapes: Shapes) -> State:
    index = {name: state["model"][_key(name, "index")] for name in shapes}

    def layer(name: str, saved: State) -> State:
        mask = torch.zeros(math.prod(shapes[name]), dtype=torch.bool).index_fill_(0, index[name].long(), True)
        return {**saved, "mask": pack_bits(mask)}

    def signs(name: str, bits: Tensor) -> Tensor:
        return (get_bits(bits, math.prod(shapes[name])).to(torch.int8) * 2 - 1).view(shapes[name])

    return {
        **state,
        "storage": "masked",
        "model": _dense_tensors(state["model"], shapes),
        "optimizer": _converted(state["optimizer"], index, lambda name, t: _spread(t, index[name], shapes[name])),
        "ema": _ema(state, lambda values: _dense_tensors(values, shapes, index)),
        "topology": _topology(state["topology"], layer, signs, torch.uint8),
        "correction": {**state["correction"], "snapshot": _dense_tensors(state["correction"]["snapshot"], shapes)},
    }


def _packed(state: State, shapes: Shapes) -> State:
    masks = {name: get_bits(state["topology"]["layers"][name]["mask"], math.prod(shapes[name])) for name in shapes}
    index = {name: mask.nonzero().flatten().to(torch.int32) for name, mask in masks.items()}

    def layer(name: str, saved: State) -> State:
        return {key: value for key, value in saved.items() if key != "mask"}

    def signs(name: str, values: Tensor) -> Tensor:
        return pack_bits(values.reshape(-1) > 0)

    correction = state["correction"]
    return {
        **state,
        "storage": "packed",
        "model": _vectors(state["model"], index),
        "optimizer": _converted(state["optimizer"], index, lambda name, t: t.reshape(-1)[index[name].long()]),
        "ema": _ema(state, lambda values: _vectors(values, index, with_index=False)),
        "topology": _topology(state["topology"], layer, signs, torch.int8),
        "correction": {**correction, "snapshot": _vectors(correction["snapshot"], _snapshot_index(state, shapes))},
    }


def _key(name: str, leaf: str) -> str:
    """Name of a tensor of the packed layer `a`, whose weight was called `a.weight` or `a_weight`."""
    return f"{name[: -len('.weight')]}.{leaf}"


def _spread(values: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.new_zeros(math.prod(shape)).index_copy_(0, index.long(), values).view(shape)


def _topology(
    state: State, layer: Callable[[str, State], State], signs: Callable[[str, Tensor], Tensor], dtype: torch.dtype
) -> State:
    """Convert the bitmaps by `layer`, and BSR-Net's signs, which are the memory of type `dtype`, by `signs`."""
    memory = {name: signs(name, kept) if kept.dtype == dtype else kept for name, kept in state["memory"].items()}
    return {
        **state,
        "layers": {name: layer(name, saved) for name, saved in state["layers"].items()},
        "memory": memory,
    }


def _dense_tensors(
    tensors: Mapping[str, Tensor], shapes: Shapes, index: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Replace each packed vector by its dense weight. The indices are taken from `tensors` if `index` is `None`."""
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


def _converted(
    optimizer: Mapping[str, State], index: Mapping[str, Tensor], convert: Callable[[str, Tensor], Tensor]
) -> dict[str, State]:
    """Convert the tensors of an optimizer's state that hold one number for each weight."""

    def whole(name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.dim() > 1 or value.shape == (len(index[name]),))

    return {
        name: {key: convert(name, v) if name in index and whole(name, v) else v for key, v in tensors.items()}
        for name, tensors in optimizer.items()
    }


def _ema(state: State, convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> State | None:
    ema = state["ema"]
    return None if ema is None else {**ema, "values": convert(ema["values"])}


def _snapshot_index(state: State, shapes: Shapes) -> dict[str, Tensor]:
    """Active indices of the snapshot: those of the active vector, or the nonzero weights if there is no vector."""
    snapshot, vector = state["correction"]["snapshot"], state["correction"]["active_vector"]
    if not snapshot:
        return {}
    known = {} if vector is None else dict(zip(state["names"], vector["indices"], strict=True))
    result = {}
    for name, shape in shapes.items():
        weight = snapshot[name].reshape(-1)
        index = known.get(name, weight.nonzero().flatten())
        result[name] = (torch.arange(math.prod(shape)) if index is None else index).to(torch.int32)
    return result
