"""Choose whether a part of a packed model runs in the blocked layout, and which of its layers run dense there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import fx, nn
from torch.fx import Node

from equipoise.kernels import operators
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.storage import layer_cost
from equipoise.storage.blocked_graph import blocked_graph
from equipoise.storage.packed_modules import PackedLayer

WHOLE_MAP = 64  # positions assumed in a map that is pooled or flattened as a whole
Layers = dict[str, PackedLayer]


class Costs(NamedTuple):
    """Estimated times in the units of `layer_cost`.

    Attributes:
        plain: For each position of the input of an image, layer by layer.
        blocked: The same in the blocked layout, without padding.
        calls: What calls take in the blocked layout beyond those of layer by layer, whatever the size of the batch.
    """

    plain: float
    blocked: float
    calls: float


class Choice(NamedTuple):
    """How a part of a model runs fastest.

    Attributes:
        dense: Layers that take plain tensors between blocked ones, by name; most of them run dense.
        time: Estimated time in the blocked layout, relative to running layer by layer, in large batches.
        costs: Of the layers in the blocked layout, and the operations after them.
    """

    dense: frozenset[str]
    time: float
    costs: Costs

    def pays(self, images: int, positions: int, padding: float) -> bool:
        """Return whether the blocked layout is faster for a batch, which it lengthens by the factor `padding`."""
        saved = self.costs.plain - padding * self.costs.blocked
        return self.time * padding <= 1 and images * positions * saved >= self.costs.calls


def choose(graph: fx.Graph, model: nn.Module) -> Choice:
    """Estimate the time of a model in the blocked layout and layer by layer, from its graph and densities alone.

    Args:
        graph: The graph of a packed model.
        model: The model.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}
    dense = dense_layers(model)
    dense |= _alone(blocked_graph(graph, model, dense), layers)
    sizes = _sizes(blocked_graph(graph, model, dense), layers)
    called = [(str(node.target), size.positions) for node, size in sizes.items() if _is_layer(node, layers)]
    costs = _costs([(name, positions) for name, positions in called if name not in dense], layers, sizes)
    if all(layer_cost.is_small(layers[name].shape) for name, _ in called):
        return Choice(dense, 0.0, costs)
    blocked = one_by_one = 0.0
    for name, positions in called:
        shape, active = layers[name].shape, layers[name].values.numel()
        plain = min(layer_cost.dense(shape), layers[name].time_alone())
        blocked += positions * (plain if name in dense else layer_cost.sparse(shape, active))
        one_by_one += positions * plain
    for node, size in sizes.items():
        if node.target in (to_blocked, from_blocked):
            blocked += size.positions * size.channels * layer_cost.CONVERTED_CHANNEL
    return Choice(dense, layer_cost.BLOCKED * blocked / one_by_one, costs)


def _costs(called: Sequence[tuple[str, float]], layers: Layers, nodes: Iterable[Node]) -> Costs:
    """The costs of layers by name and positions; a layer that is called twice counts twice."""
    sized = [(positions, layers[name].shape, layers[name].values.numel()) for name, positions in called]
    plain = sum(positions * layer_cost.with_norm(shape) for positions, shape, _ in sized)
    blocked = sum(positions * layer_cost.with_norm_in_blocks(shape, active) for positions, shape, active in sized)
    conversions = sum(node.target in (to_blocked, from_blocked) for node in nodes)
    calls = layer_cost.CALL_IN_BLOCKS * len(called) + layer_cost.CALL_OF_CONVERSION * conversions
    return Costs(plain, blocked, calls)


def dense_layers(model: nn.Module) -> frozenset[str]:
    """Return the names of the packed layers for which leaving the blocked layout and running dense is faster."""
    layers = model.named_modules()
    return frozenset(name for name, layer in layers if isinstance(layer, PackedLayer) and layer.dense_in_blocks)


def _is_layer(node: Node, layers: Layers) -> bool:
    return node.op == "call_module" and node.target in layers


def _alone(graph: fx.Graph, layers: Layers) -> frozenset[str]:
    """Layers between plain tensors for which the conversions are not worth it, or not needed."""
    between = {str(node.target) for node in graph.nodes if _is_layer(node, layers) and _is_between_plain(node)}
    return frozenset(name for name in between if layers[name].dense_alone() or layers[name].of_patches is not None)


def _is_between_plain(node: Node) -> bool:
    source = node.args[0]
    converted = isinstance(source, Node) and source.target is to_blocked and len(source.users) == 1
    return converted and all(user.target is from_blocked for user in node.users)


class _Size(NamedTuple):
    """Size of an activation: positions relative to the input of the graph, and channels."""

    positions: float
    channels: int


def _sizes(graph: fx.Graph, layers: Layers) -> dict[Node, _Size]:
    sizes: dict[Node, _Size] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        sizes[node] = _size(node, sizes[sources[0]] if sources else _Size(1.0, 0), layers)
    return sizes


def _size(node: Node, source: _Size, layers: Layers) -> _Size:
    if _is_layer(node, layers):
        shape = layers[str(node.target)].shape
        return _Size(source.positions / math.prod(shape.stride), shape.out_channels)
    if node.target is to_blocked:
        readers = [layers[str(user.target)].shape.in_channels for user in node.users if _is_layer(user, layers)]
        return _Size(source.positions, max([source.channels, *readers]))
    if node.target is operators.flatten:
        return _Size(source.positions / WHOLE_MAP, source.channels)
    if node.target is operators.avg_pool:
        kernel = node.kwargs.get("kernel", (WHOLE_MAP,))
        return _Size(source.positions / math.prod(kernel), source.channels)  # type: ignore[arg-type]
    pooled = node.target is operators.max_pool or node.kwargs.get("pool")
    return _Size(source.positions / 4, source.channels) if pooled else source
