"""The blocked stretch of a packed model as kernel steps, with BatchNorm and ReLU folded into convolutions."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from equipoise.deploy.fold import affine
from equipoise.kernels import library, operators
from equipoise.kernels.geometry import NO_BORDER
from equipoise.kernels.planes import Planes
from equipoise.kernels.pool import Pool
from equipoise.kernels.steps import Batch, KernelSteps
from equipoise.storage.blocked_norm import BlockedBatchNorm
from equipoise.storage.packed_modules import PackedLayer

# Options of a pass over planes that each operation stands for
POINTWISE: dict[Any, dict[str, Any]] = {
    operators.relu: {"relu": True},
    operators.max_pool: {"pool": True},
    operators.add: {},
}


class Program:
    """A stretch of a graph, compiled for one input shape.

    Args:
        nodes: The stretch; its first node is the input, its last one the output.
        model: The model that the nodes belong to.
        shape: Shape of one input, without the batch.
        blocks: Blocks of images that run together.
        batch: How the images run.
    """

    def __init__(
        self, nodes: list[Node], model: nn.Module, shape: tuple[int, ...], blocks: int, batch: Batch
    ) -> None:
        self._model = model
        self._steps = KernelSteps(blocks, batch.lanes, batch.half)
        self._values: dict[Node, Planes] = {}
        self._folded: set[Node] = set()
        channels, height, width = {3: shape, 2: (shape[0], 1, shape[-1]), 1: (shape[0], 1, 1)}[len(shape)]
        border = cast("tuple[int, int]", nodes[0].kwargs.get("border", NO_BORDER))
        self._values[nodes[0]] = self._steps.buffer((channels, height, width), border)
        for node in nodes[1:]:
            if node not in self._folded:
                self._add(node)
        self._dims = dimensions(nodes, len(shape) + 1)[nodes[-1]]
        self._input = self._values[nodes[0]].size
        make = partial(self._steps.buffers, self._values[nodes[0]], self._values[nodes[-1]])
        self._pool = Pool(make, first=[make()])

    def run(self, x: Tensor) -> Tensor:
        """Compute the output for a batch of inputs. Threads may call this at the same time."""
        images = x.detach().reshape(x.shape[0], *self._input).numpy()
        with self._pool.lend() as buffers:
            y = torch.from_numpy(buffers.compute(images, library.threads()))
        return {4: y, 3: y.squeeze(2), 2: y.flatten(1)}[self._dims]

    def _add(self, node: Node) -> None:
        options: dict[str, Any] = dict(node.kwargs)
        module, x = _module(node, self._model), self._source(node)
        if isinstance(module, PackedLayer):
            self._add_layer(node, module)
        elif isinstance(module, BlockedBatchNorm):
            module.check_channels(x.size[0])
            scale, shift = affine(module, torch.float32)
            self._values[node] = self._plane(x, {"scale": scale.numpy(), "shift": shift.numpy(), **options})
        elif node.target is operators.avg_pool:
            self._values[node] = self._steps.mean(x, **options)
        elif node.target is operators.flatten:
            self._values[node] = self._steps.flatten(x)
        else:
            residual = {"residual": node.args[1]} if node.target is operators.add else {}
            self._values[node] = self._plane(x, {**options, **POINTWISE[node.target], **residual})

    def _source(self, node: Node) -> Planes:
        return self._values[cast(Node, node.args[0])]

    def _plane(self, x: Planes, options: dict[str, Any]) -> Planes:
        if "residual" in options:
            options = {**options, "residual": self._values[options["residual"]]}
        return self._steps.plane(x, **options)

    def _add_layer(self, node: Node, layer: PackedLayer) -> None:
        """Add a convolution, with a BatchNorm or a ReLU folded in if nothing else reads the convolution."""
        layer.check_values()
        values, bias = layer.values.detach(), None if layer.bias is None else layer.bias.detach()
        last: Node = node
        options: dict[str, Any] = dict(node.kwargs)
        user = next(iter(node.users)) if len(node.users) == 1 else None
        norm = None if user is None else _module(user, self._model)
        if user is not None and isinstance(norm, BlockedBatchNorm) and self._foldable(user, node):
            norm.check_channels(layer.shape.out_channels)
            scale, shift = affine(norm, torch.float32)
            values = values * scale.repeat_interleave(_row_counts(layer))
            bias = shift if bias is None else bias * scale + shift
            last, options = user, dict(user.kwargs)
        elif user is not None and user.target is operators.relu:
            last, options = user, {"relu": True, **user.kwargs}
        after = options if {"pool", "residual"} & options.keys() else {}
        numbers = (layer.pattern.index.numpy(), values.numpy(), None if bias is None else bias.numpy())
        y = self._steps.conv(self._source(node), layer.shape, *numbers, **({} if after else options))
        self._values[last] = self._plane(y, after) if after else y
        self._folded.add(last)

    def _foldable(self, norm: Node, layer: Node) -> bool:
        """Whether the norm reads the layer and its residual, if it has one, exists already."""
        return norm.args[0] is layer and norm.kwargs.get("residual") in {None, *self._values}


def dimensions(nodes: list[Node], dims: int) -> dict[Node, int]:
    """Return the number of dimensions of each value of a blocked stretch, for an input of `dims` dimensions."""
    found = {nodes[0]: dims}
    for node in nodes[1:]:
        found[node] = 2 if node.target is operators.flatten else found[cast(Node, node.args[0])]
    return found


def supports(nodes: list[Node], model: nn.Module, dims: int) -> bool:
    """Return whether a program computes the same as the layers for an input of `dims` dimensions.

    Layers reshape some inputs and refuse others; a program does neither.
    """
    found = dimensions(nodes, dims)
    for node in nodes[1:]:
        layer, have = _module(node, model), found[cast(Node, node.args[0])]
        if isinstance(layer, PackedLayer) and layer.dims != have:
            return False
        if have != 4 and (node.target in (operators.max_pool, operators.avg_pool) or node.kwargs.get("pool")):
            return False
    return True


def _module(node: Node, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _row_counts(layer: PackedLayer) -> Tensor:
    """Active weights of each output channel."""
    per_row = layer.pattern.index // max(1, layer.shape.weight_numel // max(1, layer.shape.out_channels))
    return torch.bincount(per_row.long(), minlength=layer.shape.out_channels)
