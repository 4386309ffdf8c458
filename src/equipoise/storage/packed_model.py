"""A traced model in the blocked layout that can be copied and pickled."""

from __future__ import annotations

from typing import Any, cast

from torch import fx
from torch.fx.graph_module import reduce_graph_module

from equipoise.kernels import operators
from equipoise.kernels.blocked import from_blocked, to_blocked
from equipoise.storage.trace import Tracer

BLOCKED = (operators.relu, operators.max_pool, operators.add, operators.avg_pool, operators.flatten)
Details = tuple[str, dict[str, set[str]]]  # name of the class, names of the buffers that are not saved


class PackedTracer(Tracer):
    """Traces the code of a packed model when it is unpickled; operations on blocked activations are leaves."""

    def __init__(self) -> None:
        super().__init__((to_blocked, from_blocked, *BLOCKED))


class PackedModel(fx.GraphModule):
    """A graph module whose copies keep the name of its class and its list of buffers that are not saved."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedModel:
        return _with_details(cast(PackedModel, super().__deepcopy__(memo)), _details(self))

    def __reduce__(self) -> tuple[Any, ...]:
        _, (attributes, imports) = super().__reduce__()
        return _unpickled, (attributes, imports, _details(self))


def _details(model: fx.GraphModule) -> Details:
    unsaved = {name: set(module._non_persistent_buffers_set) for name, module in model.named_modules()}
    return type(model).__name__, unsaved


def _with_details(model: PackedModel, details: Details) -> PackedModel:
    type(model).__name__, unsaved = details
    for name, module in model.named_modules():
        module._non_persistent_buffers_set = unsaved[name]
    return model


def _unpickled(attributes: dict[str, Any], imports: str, details: Details) -> PackedModel:
    """Rebuild a model from the code of its graph, which torch pickles."""
    plain = cast(fx.GraphModule, reduce_graph_module(attributes, imports))
    new = PackedModel(plain, plain.graph)
    # includes modules and tensors that the forward does not use
    new._modules, new._parameters, new._buffers = plain._modules, plain._parameters, plain._buffers
    return _with_details(new, details)
