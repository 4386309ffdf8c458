"""A traced model in the blocked layout, which can be copied and pickled."""

from __future__ import annotations

from typing import Any, cast

from torch import fx
from torch.fx.graph_module import reduce_graph_module

from equipoise.kernels import operators as functional
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.storage.trace import Tracer

BLOCKED = (functional.relu, functional.max_pool, functional.add, functional.avg_pool, functional.flatten)
Looks = tuple[str, dict[str, set[str]]]


class PackedTracer(Tracer):
    """What unpickling traces the code of a packed model with: its operations are not to be looked into."""

    def __init__(self) -> None:
        super().__init__((to_blocked, from_blocked, *BLOCKED))


class PackedModel(fx.GraphModule):
    """A graph module whose copies are like it: torch's lose the name of the class and save all of their buffers."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedModel:
        return _made_like(cast(PackedModel, super().__deepcopy__(memo)), _looks(self))

    def __reduce__(self) -> tuple[Any, ...]:
        _, (attributes, imports) = super().__reduce__()
        return _unpickled, (attributes, imports, _looks(self))


def _looks(model: fx.GraphModule) -> Looks:
    unsaved = {name: set(module._non_persistent_buffers_set) for name, module in model.named_modules()}
    return type(model).__name__, unsaved


def _made_like(model: PackedModel, looks: Looks) -> PackedModel:
    type(model).__name__, unsaved = looks
    for name, module in model.named_modules():
        module._non_persistent_buffers_set = unsaved[name]
    return model


def _unpickled(attributes: dict[str, Any], imports: str, looks: Looks) -> PackedModel:
    """Traced from the code of the graph, which is what torch pickles of it."""
    plain = cast(fx.GraphModule, reduce_graph_module(attributes, imports))
    new = PackedModel(plain, plain.graph)
    # also what the forward does not use
    new._modules, new._parameters, new._buffers = plain._modules, plain._parameters, plain._buffers
    return _made_like(new, looks)
