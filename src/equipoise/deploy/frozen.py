"""Packed models for inference: `freeze` turns a packed model into programs of kernel steps."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from equipoise.deploy.program import Program, supports
from equipoise.kernels.blocked import as_float32, from_blocked, to_blocked
from equipoise.kernels.library import LANES, available
from equipoise.storage.pack import trace
from equipoise.storage.packed_model import BLOCKED
from equipoise.storage.packed_modules import BlockedBatchNorm, PackedLayer

FEW = 8  # fewer images run faster plane by plane than side by side
# Limits of the images that run through the whole network together. Many images share large steps and wake threads
# seldom, but every step has a separate buffer: no more than those of 128 small images.
POSITIONS = 128 * 32 * 32
MOST_BLOCKS = 8
MOST_PROGRAMS = 16  # compiled at a time; batches of all sizes of one image shape need at most 5


def freeze(model: nn.Module) -> nn.Module:
    """Prepare a packed model for inference, with its present weights, BatchNorm folded and no gradients.

    Args:
        model: A packed model; it is not changed.

    Returns:
        A `Frozen` model. If the kernels are not available, or the model leaves the blocked layout between two packed
        layers, a copy of the model in eval mode.
    """
    if isinstance(model, Frozen):
        return model
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if not available():
        return model
    # a forward that reads `self.training` or uses no_grad cannot be traced for training, but inference has one mode
    with torch.no_grad():
        traced = model if isinstance(model, fx.GraphModule) else trace(copy.deepcopy(model), modes=(False,))
    parts = None if traced is None else _parts(traced)
    return model if traced is None or parts is None else Frozen(traced, *parts)


def _parts(model: fx.GraphModule) -> tuple[list[Node], list[Node], list[Node]] | None:
    """Nodes before, in and after the blocked stretch; `None` if there is not exactly one stretch."""
    nodes = list(model.graph.nodes)
    inside = [node for node in nodes if node.target is to_blocked or _is_blocked(node, model)]
    ends = [node for node in nodes if node.target is from_blocked]
    begins = [node for node in inside if node.target is to_blocked]
    if not inside or begins != inside[:1] or len(ends) != 1:
        return None
    first, last = nodes.index(inside[0]), nodes.index(ends[0])
    if nodes[first:last] != inside or ends[0].args[0] is not inside[-1]:
        return None
    norms = [m for m in model.modules() if isinstance(m, BlockedBatchNorm)]
    if any(norm.running_mean is None for norm in norms):
        return None
    return nodes[:first], inside, nodes[last:]


def _is_blocked(node: Node, model: nn.Module) -> bool:
    if node.op != "call_module":
        return node.target in BLOCKED
    module = model.get_submodule(str(node.target))
    inputs = [argument for argument in node.args if isinstance(argument, Node)]
    packed = isinstance(module, BlockedBatchNorm) or (isinstance(module, PackedLayer) and not module.dense)
    return packed and inputs[0].target is not from_blocked


class Frozen(nn.Module):
    """A packed model as programs, one per input shape and number of images, built when first needed.

    Any number of threads may call one model at the same time. Each call that runs at the same time has separate
    buffers. The 16 programs that were used last are kept (`MOST_PROGRAMS`). A program keeps one set of buffers for
    each call that ran at the same time, at most one for each core.
    """

    def __init__(self, model: fx.GraphModule, before: list[Node], inside: list[Node], after: list[Node]) -> None:
        super().__init__()
        self.model = model
        self._before, self._inside, self._after = before, inside, after
        self._placeholders = [node for node in before if node.op == "placeholder"]
        self._dims = {dims for dims in (2, 3, 4) if supports(inside, model, dims)}
        # No lock, which a forked child could wait for in vain: single operations of an OrderedDict are atomic.
        self._programs: OrderedDict[tuple[int, ...], Program] = OrderedDict()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._programs.clear()  # they have copies of the weights
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._programs.clear()
        super()._load_from_state_dict(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return freeze, (self.model,)  # a copy builds other programs

    @torch.no_grad()
    def forward(self, *inputs: Any, **named: Any) -> Any:
        if named or len(inputs) != len(self._placeholders):
            return self.model(*inputs, **named)  # it knows names and defaults
        values: dict[Node, Any] = dict(zip(self._placeholders, inputs, strict=True))
        for node in self._before:
            if node.op != "placeholder":
                values[node] = _evaluate(node, values, self.model)
        x = as_float32(values[self._inside[0].args[0]])  # type: ignore[index]
        if x.dim() not in self._dims:
            return self.model(*inputs)  # its layers reshape the input or say what is wrong with it
        values[self._after[0]] = self._run(x)
        for node in self._after[1:]:
            values[node] = _evaluate(node, values, self.model)
        return values[self._after[-1]]

    def _run(self, x: Tensor) -> Tensor:
        lanes = 1 if x.shape[0] < FEW else LANES
        shape = tuple(x.shape[1:])
        parts = [
            self._program(shape, _round_up(-(-images.shape[0] // lanes)), lanes).run(images)
            for images in x.split(1 if lanes == 1 else LANES * _most_blocks(shape))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _program(self, shape: tuple[int, ...], blocks: int, lanes: int) -> Program:
        key = (blocks, lanes, *shape)
        program = self._programs.get(key)
        if program is None:
            program = self._programs.setdefault(key, Program(self._inside, self.model, shape, blocks, lanes))
        with suppress(KeyError):  # another thread may have removed it
            self._programs.move_to_end(key)
            while len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        return program


def _most_blocks(shape: tuple[int, ...]) -> int:
    """Blocks that run together; a power of two."""
    room = POSITIONS // (LANES * max(1, math.prod(shape[1:])))
    return 1 << (min(max(room, 1), MOST_BLOCKS).bit_length() - 1)


def _round_up(count: int) -> int:
    """Round up to a power of two, so that batches of all sizes share few programs."""
    return 1 << max(count - 1, 0).bit_length()


def _evaluate(node: Node, values: dict[Node, Any], model: nn.Module) -> Any:
    """Run a plain node of the graph."""
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    if node.op == "output":
        return args[0]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return getattr(model.get_submodule(owner), name)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
