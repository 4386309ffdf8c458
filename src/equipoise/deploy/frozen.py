"""Packed networks for inference: `freeze` turns a packed model into programs of kernel steps."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from equipoise.deploy.program import Program, runs
from equipoise.kernels import library as kernels
from equipoise.kernels.blocked import as_float32, from_blocked, to_blocked
from equipoise.kernels.library import LANES, Map, byref
from equipoise.storage.pack import trace
from equipoise.storage.packed_model import BLOCKED
from equipoise.storage.packed_modules import BlockedBatchNorm, PackedLayer

FEW = 8  # images below which plane by plane beats side by side
# Images that go through the whole network together: many, so that threads are woken seldom and share large steps,
# but no more than a batch of 128 small ones, for every step has a buffer of its own.
POSITIONS = 128 * 32 * 32
MOST_BLOCKS = 8


def freeze(model: nn.Module) -> nn.Module:
    """The packed model for inference: weights as they are now, BatchNorm folded, no gradients.

    A model that leaves the blocked layout halfway cannot be made one program; it comes back as a copy in eval mode.
    """
    if isinstance(model, Frozen):
        return model
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if not kernels.available():
        return model
    # a forward that looks at `self.training` or uses no_grad cannot be traced for training, but here is one mode only
    with torch.no_grad():
        traced = model if isinstance(model, fx.GraphModule) else trace(copy.deepcopy(model), modes=(False,))
    parts = None if traced is None else _parts(traced)
    return model if traced is None or parts is None else Frozen(traced, *parts)


def _parts(model: fx.GraphModule) -> tuple[list[Node], list[Node], list[Node]] | None:
    """Nodes before, in and after the one blocked stretch; None where there is not exactly one."""
    nodes = list(model.graph.nodes)
    inside = [node for node in nodes if node.target is to_blocked or _is_blocked(node, model)]
    ends = [node for node in nodes if node.target is from_blocked]
    if (
        [node.target for node in inside].count(to_blocked) != 1
        or inside[0].target is not to_blocked
        or len(ends) != 1
    ):
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
    """A packed model as programs, one per input shape and per layout, built when first needed."""

    def __init__(self, model: fx.GraphModule, before: list[Node], inside: list[Node], after: list[Node]) -> None:
        super().__init__()
        self.model = model
        self._before, self._inside, self._after = before, inside, after
        self._placeholders = [node for node in before if node.op == "placeholder"]
        self._dims = {dims for dims in (2, 3, 4) if runs(inside, model, dims)}
        self._programs: dict[tuple[int, ...], Program] = {}
        self._lock = threading.Lock()  # programs own their buffers

    def __reduce__(self) -> tuple[Any, ...]:
        return freeze, (self.model,)  # a copy builds its programs anew

    @torch.no_grad()
    def forward(self, *inputs: Any, **named: Any) -> Any:
        if named or len(inputs) != len(self._placeholders):
            return self.model(*inputs, **named)  # which knows names and defaults
        values: dict[Node, Any] = dict(zip(self._placeholders, inputs, strict=True))
        for node in self._before:
            if node.op != "placeholder":
                values[node] = _evaluate(node, values, self.model)
        x = as_float32(values[self._inside[0].args[0]])  # type: ignore[index]
        if x.dim() not in self._dims:
            return self.model(*inputs)  # whose layers fold what they can, and say what is wrong with the rest
        with self._lock:
            values[self._after[0]] = self._run(x)
        for node in self._after[1:]:
            values[node] = _evaluate(node, values, self.model)
        return values[self._after[-1]]

    def _run(self, x: Tensor) -> Tensor:
        lanes = 1 if x.shape[0] < FEW else LANES
        shape = tuple(x.shape[1:])
        parts: list[Tensor] = []
        for images in x.split(1 if lanes == 1 else LANES * _most_blocks(shape)):
            program = self._program(shape, _round_up(-(-images.shape[0] // lanes)), lanes)
            if images.shape[0]:
                self._load(program, images.reshape(images.shape[0], *program.input.shape[1:4]))
                program.run()
            parts.append(self._result(program, images.shape[0]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _program(self, shape: tuple[int, ...], blocks: int, lanes: int) -> Program:
        key = (blocks, lanes, *shape)
        if key not in self._programs:
            self._programs[key] = Program(self._inside, self.model, shape, blocks, lanes)
        return self._programs[key]

    def _load(self, program: Program, x: Tensor) -> None:
        if program.lanes == 1:
            program.input[..., 0].copy_(x)
        else:
            plain = Map(x.data_ptr(), *x.shape, *x.stride())
            kernels.library().eq_layout(byref(plain), byref(kernels.describe(program.input)), 1, kernels.threads())

    def _result(self, program: Program, images: int) -> Tensor:
        whole = program.output.new_empty(images, *program.output.shape[1:4])
        if program.lanes == 1:
            whole.copy_(program.output[..., 0])
        else:
            plain = Map(whole.data_ptr(), *whole.shape, *whole.stride())
            blocks = program.output[: -(-images // LANES)]
            kernels.library().eq_layout(byref(plain), byref(kernels.describe(blocks)), 0, kernels.threads())
        return {4: whole, 3: whole.squeeze(2), 2: whole.flatten(1)}[program.dims]


def _most_blocks(shape: tuple[int, ...]) -> int:
    """A power of two."""
    room = POSITIONS // (LANES * max(1, math.prod(shape[1:])))
    return 1 << (min(max(room, 1), MOST_BLOCKS).bit_length() - 1)


def _round_up(count: int) -> int:
    """To a power of two, so that batches of all sizes share few programs."""
    return 1 << max(count - 1, 0).bit_length()


def _evaluate(node: Node, values: dict[Node, Any], model: nn.Module) -> Any:
    """A plain node of the graph, by torch."""
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
