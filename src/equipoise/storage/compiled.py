"""Shortcuts inside torch.compile: one PyTorch operator runs the eager code of a whole module.

The compiler cannot follow activations in the blocked layout. It calls `equipoise::blocked` with the input and all
tensors of the module, and the operator runs the shortcut as in eager mode, with autograd. The graph that it records
belongs to the last output, an empty tensor that compiled code saves for the backward pass, in which
`equipoise::blocked_grad` walks that graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._C import DispatchKey

from equipoise.errors import UserError
from equipoise.storage.bf16_attention import Bf16Attention
from equipoise.storage.packed_modules import PackedLayer

_operators = torch.library.Library("equipoise", "FRAGMENT")
_operators.define(
    "blocked(Tensor x, Tensor[] tensors, bool[] wanted, bool training, str key) -> (Tensor, Tensor[], Tensor)"
)
_operators.define("blocked_grad(Tensor dy, Tensor graph, Tensor x, Tensor[] leaves, bool x_wanted) -> Tensor[]")


class Runs(Protocol):
    """A shortcut, as this module needs it."""

    module: nn.Module

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Compute the output of `module`, which has other tensors than the module of the shortcut."""


_shortcuts: WeakValueDictionary[str, Runs] = WeakValueDictionary()


def register(shortcut: Runs) -> str:
    """Return the name by which compiled code finds a shortcut. It is unique: compiled code is cached on disk."""
    key = uuid4().hex
    _shortcuts[key] = shortcut
    return key


def call(module: nn.Module, key: str, x: Tensor) -> Tensor:
    """Run a shortcut in code that torch.compile traces."""
    tensors, changed = _tensors(module)
    grad = torch.is_grad_enabled()
    wanted = [grad and tensor.requires_grad for tensor in (x, *tensors)]
    out, buffers, _ = torch.ops.equipoise.blocked.default(x, tensors, wanted, module.training, key)
    for buffer, value in zip(changed, buffers, strict=True):
        buffer.copy_(value)
    return out


def _tensors(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters, buffers and probes of a module, and those buffers that a forward pass may change."""
    tensors: list[Tensor] = list(module.parameters())
    changed: list[Tensor] = []
    for part in module.modules():
        packed = isinstance(part, PackedLayer)
        own = list(part.buffers(recurse=False))
        tensors += own
        if isinstance(part, PackedLayer) and part.probe is not None:
            tensors.append(part.probe)
        if not packed and module.training:
            changed += own
    return tensors, changed


def _run(
    x: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool], training: bool, key: str
) -> tuple[Tensor, list[Tensor], Tensor]:
    shortcut = _shortcuts[key]
    old, changed = _tensors(shortcut.module)
    changed_ids = set(map(id, changed))
    leaves = [x.detach().requires_grad_(wanted[0])]
    for mine, given, needs_grad in zip(old, tensors, wanted[1:], strict=True):
        if id(mine) in changed_ids:
            given = given.clone()
        leaves.append(given.detach().requires_grad_() if needs_grad else given)
    new = {id(before): after for before, after in zip(old, leaves[1:], strict=True)}
    with _recording(any(wanted)):
        out = shortcut.run(_with_tensors(shortcut.module, new), leaves[0])
    graph = x.new_empty(0)
    differentiable = [leaf for leaf, needs_grad in zip(leaves, wanted, strict=True) if needs_grad]
    graph.owner = out, differentiable  # type: ignore[attr-defined]
    # compiled code may write into its tensors, and autograd may need the original
    return out.detach().clone(memory_format=torch.contiguous_format), [new[id(buffer)] for buffer in changed], graph


def _fake(
    x: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool], training: bool, key: str
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Shapes, by the forward of the class in evaluation mode: the mode changes no shape."""
    module = _shortcuts[key].module
    old, changed = _tensors(module)
    new = {id(before): after for before, after in zip(old, tensors, strict=True)}
    twin = _with_tensors(module, new).eval()
    with torch.no_grad():  # so that no probe takes part
        out = type(twin).forward(twin, x)
    return x.new_empty(out.shape), [torch.empty_like(new[id(buffer)]) for buffer in changed], x.new_empty(0)


def _grad(dy: Tensor, graph: Tensor, x: Tensor, leaves: Sequence[Tensor], x_wanted: bool) -> list[Tensor]:
    if not hasattr(graph, "owner"):
        raise UserError("the backward pass of a compiled packed model needs the tensors that its forward pass saved")
    out, inputs = graph.owner
    with _recording(True):
        found = torch.autograd.grad(out, inputs, dy, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(inputs, found, strict=True)]


def _fake_grad(dy: Tensor, graph: Tensor, x: Tensor, leaves: Sequence[Tensor], x_wanted: bool) -> list[Tensor]:
    return [leaf.new_empty(leaf.shape) for leaf in ([x, *leaves] if x_wanted else leaves)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, tensors, ctx.wanted, _, _ = inputs
    _, buffers, graph = output
    wanted = (tensor for tensor, needs_grad in zip(tensors, ctx.wanted[1:], strict=True) if needs_grad)
    ctx.save_for_backward(graph, x, *wanted)  # with x, because autograd may have saved it: nothing may write into it
    ctx.mark_non_differentiable(graph, *buffers)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    graph, x, *leaves = ctx.saved_tensors
    found = iter(torch.ops.equipoise.blocked_grad.default(dy, graph, x, leaves, ctx.wanted[0]))
    dx, *rest = [next(found) if needs_grad else None for needs_grad in ctx.wanted]
    return dx, rest, None, None, None


@contextmanager
def _recording(enabled: bool) -> Iterator[None]:
    """Let autograd record inside an operator, below which torch switches it off."""
    guard = torch._C._SetExcludeDispatchKeyGuard
    with (
        guard(DispatchKey.AutogradFunctionality, False),
        guard(DispatchKey.ADInplaceOrView, False),
        torch.set_grad_enabled(enabled),
    ):
        yield


def _with_tensors(module: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """A copy of a module with other tensors, given by the `id` of the present ones. Shortcuts are left out."""
    made: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in made:
            twin = made[id(part)] = part.__new__(type(part))
            own = {name: value for name, value in vars(part).items() if name != "forward"}
            for tensors in ("_parameters", "_buffers"):
                own[tensors] = {name: new.get(id(tensor), tensor) for name, tensor in own[tensors].items()}
            own["_modules"] = {
                name: None if child is None else copied(child) for name, child in own["_modules"].items()
            }
            if isinstance(part, PackedLayer):
                own["probe"] = None if part.probe is None else new.get(id(part.probe), part.probe)
            twin.__dict__ = own
            if isinstance(vars(part).get("forward"), Bf16Attention):
                twin.forward = Bf16Attention(twin)
        return made[id(part)]

    return copied(module)


for _name, _function, _shape in (("blocked", _run, _fake), ("blocked_grad", _grad, _fake_grad)):
    _operators.impl(_name, _function, "CPU")
    torch.library.register_fake(f"equipoise::{_name}", _shape, lib=_operators)
torch.library.register_autograd("equipoise::blocked", _backward, setup_context=_save, lib=_operators)
