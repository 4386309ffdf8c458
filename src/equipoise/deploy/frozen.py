"""Packed models for inference: `freeze` turns a packed model into programs of kernel steps."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from equipoise.deploy.program import Program, supports
from equipoise.kernels import boundary
from equipoise.kernels.blocked import as_float32, from_blocked, to_blocked
from equipoise.kernels.library import available
from equipoise.kernels.steps import Batch, plan
from equipoise.modules import require_model
from equipoise.storage.bf16_attention import replace_calls
from equipoise.storage.blocked_graph import BLOCKED, blocked_graph
from equipoise.storage.blocked_norm import BlockedBatchNorm
from equipoise.storage.choice import dense_layers
from equipoise.storage.pack import packed_dtype, use_blocked_norms
from equipoise.storage.packed_modules import PackedLayer
from equipoise.storage.shortcut import Plan, Run, Shortcut
from equipoise.storage.trace import Reading, read

MOST_PROGRAMS = 16  # compiled at a time; batches of all sizes of one image shape need at most 5


def freeze(model: nn.Module) -> nn.Module:
    """Prepare a packed model for inference, with its present weights, BatchNorm folded and no gradients.

    Args:
        model: A packed model; it is not changed. The frozen model keeps its precision.

    Returns:
        A copy of the model in eval mode. It runs on programs of kernel steps (`is_frozen`) if the kernels are available
        and the model stays in the blocked layout between its packed layers.
    """
    require_model("freeze(model)", model)
    if is_frozen(model):
        return model
    dtype = packed_dtype(model)
    model = copy.deepcopy(model).eval().requires_grad_(False)
    reading = read(model) if available() else None
    if reading is not None:
        use_blocked_norms(reading)
        if _parts(blocked_graph(reading.graph, model, dense_layers(model)), model) is not None:
            model.forward = Frozen(model, dtype)
    return model


def is_frozen(model: nn.Module) -> bool:
    """Return whether a model runs on programs of kernel steps."""
    return isinstance(vars(model).get("forward"), Frozen)


def _parts(graph: fx.Graph, model: nn.Module) -> tuple[list[Node], list[Node], list[Node]] | None:
    """Nodes before, in and after the blocked stretch; `None` if there is not exactly one stretch."""
    nodes = list(graph.nodes)
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
    packed = isinstance(module, BlockedBatchNorm) or (isinstance(module, PackedLayer) and not module.dense_in_blocks)
    return packed and inputs[0].target is not from_blocked


class Frozen(Shortcut):
    """The forward of a frozen model.

    Args:
        module: The module.
        dtype: Type of the activations between layers.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(module)
        self._dtype = dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self._dtype)

    def compile(self, reading: Reading, tokens: frozenset[str], exact: bool = False) -> Run | None:
        graph = blocked_graph(reading.graph, self.module, tokens | dense_layers(self.module))
        half = self._dtype is torch.bfloat16 and not exact
        if half:
            replace_calls(graph)
        parts = _parts(graph, self.module)
        return None if parts is None or self.module.training else Stretch(self.module, *parts, half)

    def is_current(self, plan: Plan) -> bool:
        return super().is_current(plan) and cast(Stretch, plan.run).has_present_weights()


class Stretch:
    """A graph with one blocked stretch. It runs as programs, one per input shape and number of images.

    Any number of threads may call one model at the same time. Each call that runs at the same time has separate
    buffers. The 16 programs that were used last are kept (`MOST_PROGRAMS`). A program keeps one set of buffers for
    each call that ran at the same time, at most one for each core.
    """

    def __init__(
        self, model: nn.Module, before: list[Node], inside: list[Node], after: list[Node], half: bool
    ) -> None:
        self._model, self._half = model, half
        self._before, self._inside, self._after = before, inside, after
        self._dims = {dims for dims in (2, 3, 4) if supports(inside, model, dims)}
        # No lock, which a forked child could wait for in vain: single operations of an OrderedDict are atomic.
        self._programs: OrderedDict[tuple[int, ...], Program] = OrderedDict()
        called = [model.get_submodule(str(node.target)) for node in inside if node.op == "call_module"]
        owned = [tensors for module in called for tensors in (module._parameters, module._buffers)]
        self._tensors = [tensors for tensors in owned if tensors]
        self._weights = self._present_weights()

    def has_present_weights(self) -> bool:
        """Whether the weights are still those that the programs copied."""
        return self._weights == self._present_weights()

    def _present_weights(self) -> list[int]:
        return boundary.versions([t for tensors in self._tensors for t in tensors.values() if t is not None])

    @torch.no_grad()
    def __call__(self, model: nn.Module, given: Tensor) -> Any:
        values: dict[Node, Any] = {self._before[0]: given}
        for node in self._before[1:]:
            values[node] = _evaluate(node, values, model)
        x = as_float32(values[self._inside[0].args[0]])  # type: ignore[index]
        if x.dim() not in self._dims:
            return type(model).forward(model, given)  # the layers reshape the input or say what is wrong with it
        values[self._after[0]] = self._run(x)
        for node in self._after[1:]:
            values[node] = _evaluate(node, values, model)
        return values[self._after[-1]]

    def _run(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        batch = plan(x.shape[0], shape, self._half)
        if x.shape[0] <= batch.together:
            return self._program(shape, x.shape[0], batch).run(x)
        return torch.cat([self._program(shape, len(part), batch).run(part) for part in x.split(batch.together)])

    def _program(self, shape: tuple[int, ...], images: int, batch: Batch) -> Program:
        blocks = batch.blocks(images)
        key = (blocks, batch.lanes, batch.half, *shape)
        program = self._programs.get(key)
        if program is None:
            program = self._programs.setdefault(key, Program(self._inside, self._model, shape, blocks, batch))
        with suppress(KeyError):  # another thread may have removed it
            self._programs.move_to_end(key)
            while len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        return program


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
