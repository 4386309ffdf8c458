"""An engine that records and replays on a CPU, as CUDA graphs do on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.training.engine import Engine


class FixedAddressEngine(Engine):
    """Runs functions as they are, on the tensors and with the optimizers of an engine that records."""

    captures = True


class ReplayEngine(FixedAddressEngine):
    """Runs each function once, records its tensor operations the second time, and replays them from then on.

    A replay executes operations on tensors and no Python of ours, like a CUDA graph. A counter that changes inside a
    recorded function, or a number of the host that it reads, therefore shows as a difference to eager steps.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Callable[[], object]] = {}
        self.replays = 0

    def run(self, key: Hashable | None, function: Callable[[], None]) -> None:
        if key is None:
            function()
        elif key in self._recorded:
            with torch.no_grad():
                self._recorded[key]()
            self.replays += 1
        elif key in self._seen:
            self._recorded[key] = _waiting(make_fx(_with_output(function))())
        else:
            function()
            self._seen.add(key)

    def reset(self) -> None:
        self._seen.clear()
        self._recorded.clear()


def _waiting(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let a graph wait for its all-reduces, as the stream of a GPU does; a trace leaves the waiting out."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.c10d.allreduce_.default:
            node.target = _all_reduce
    graph.recompile()
    return graph


def _all_reduce(tensors: list[torch.Tensor], *_: object) -> tuple[list[torch.Tensor], None]:
    torch.distributed.all_reduce(tensors[0])
    return tensors, None


def _with_output(function: Callable[[], None]) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        function()
        return torch.zeros(())  # a graph must return something

    return work
