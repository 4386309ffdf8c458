"""An engine that records and replays on a CPU, as CUDA graphs do on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from equipoise.training.engine import Engine

HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


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
        self._recorded: dict[Hashable, Recording] = {}
        self.replays = 0

    def run(self, key: Hashable | None, function: Callable[[], None]) -> None:
        if key is None:
            function()
        elif key in self._recorded:
            self._recorded[key].replay()
            self.replays += 1
        elif key in self._seen:
            self._recorded[key] = Recording()
            with self._recorded[key]:
                function()
        else:
            function()
            self._seen.add(key)

    def reset(self) -> None:
        self._seen.clear()
        self._recorded.clear()


class Recording(TorchDispatchMode):
    """The operations on tensors of a block, with their arguments and results, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any]] = []  # operation, arguments, result

    def __torch_dispatch__(
        self, operation: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert operation not in HOST_READS, f"{operation} waits for the device, which a CUDA graph cannot record"
        result = operation(*args, **(kwargs or {}))
        self._calls.append((_replayed(operation), (args, kwargs or {}), result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again. Tensors from outside of the block are the same, at the same addresses."""
        now: dict[int, Tensor] = {}  # by the `id` of the tensor in the recording, which keeps it alive

        def current(value: Any) -> Any:
            return now.get(id(value), value)

        for operation, arguments, result in self._calls:
            args, kwargs = tree_map(current, arguments)
            found = tree_leaves(operation(*args, **kwargs))
            pairs = zip(tree_leaves(result), found, strict=True)
            now |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}


def _replayed(operation: Any) -> Callable[..., Any]:
    """The operation to replay: all-reduces wait for their result, as the stream of a GPU does."""
    return _all_reduce if operation is torch.ops.c10d.allreduce_.default else operation


def _all_reduce(tensors: list[Tensor], *_: object) -> tuple[list[Tensor], None]:
    torch.distributed.all_reduce(tensors[0])
    return tensors, None
