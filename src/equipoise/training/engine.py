"""Engines: how the functions of a training step are executed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FIRST_STEPS = 3  # run, recorded, replayed


class Engine:
    """Runs the functions of a training step as they are.

    Attributes:
        captures: Whether functions are recorded: then they must read and write tensors at fixed addresses.
    """

    captures = False

    def compiled(self, function: Callable[..., Any], combine: bool = False) -> Callable[..., Any]:
        """The function, compiled if the engine compiles.

        Args:
            function: A function of tensors.
            combine: Whether to run independent operations of the function in one kernel.
        """
        return function

    def run(self, key: Hashable | None, function: Callable[[], None]) -> None:
        """Run a function.

        Args:
            key: Functions with the same key launch the same work on the device. `None`: never record it.
            function: A function without arguments that changes tensors and no state of the host.
        """
        function()

    def kept(self, old: tuple[Tensor, ...] | None, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors with the values of `new`: if the engine captures, copies at the addresses of `old`."""
        if not self.captures:
            return new
        kept = tuple(torch.empty_like(tensor) for tensor in new) if old is None else old
        for there, tensor in zip(kept, new, strict=True):
            there.copy_(tensor)
        return kept

    def register(self, generator: torch.Generator) -> None:
        """Announce a generator that functions draw from; its seed may be set between calls of `run`."""

    def count_step(self) -> None:
        """Count a step that has been taken."""

    def reset(self) -> None:
        """Discard all recordings, because tensors have moved."""

    def give_up(self, error: RuntimeError) -> str:
        """Stop recording and return the reason; raise `error` if recording cannot be its cause."""
        raise error


class CudaEngine(Engine):
    """Compiles functions and captures what they launch in CUDA graphs.

    The first run of a key is an ordinary one: it compiles, tunes and allocates, which must not happen while recording.
    The second is recorded and replayed, and from then on it is replayed.

    Args:
        device: The CUDA device.
        compile: Whether to compile.
        on_startup: Called with the seconds of each first run and each recording.
        communicates: Whether functions communicate with other processes. The threads of nccl then call CUDA while
            this one captures.
    """

    def __init__(
        self,
        device: torch.device,
        compile: bool = True,
        on_startup: Callable[[float], None] = lambda seconds: None,
        communicates: bool = False,
    ) -> None:
        self.captures = True
        self._compiles = compile
        self._on_startup = on_startup
        self._error_mode = "thread_local" if communicates else "global"
        self._steps = 0
        self._generators: list[torch.Generator] = []
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def compiled(self, function: Callable[..., Any], combine: bool = False) -> Callable[..., Any]:
        if not self._compiles:
            return function
        fast = torch.compile(function, dynamic=False, options={"combo_kernels": True} if combine else None)
        if isinstance(function, nn.Module):
            return fast  # a module that is compiled is a module
        return lambda *arguments: (fast if self._compiles else function)(*arguments)

    def register(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    def run(self, key: Hashable | None, function: Callable[[], None]) -> None:
        if key is None or not self.captures:
            function()
        elif key in self._graphs:
            self._graphs[key].replay()
        elif key in self._seen:
            with self._timed():
                self._graphs[key] = self._recorded(function)
            self._graphs[key].replay()
        else:
            with self._timed():
                self._run_on_stream(function)
            self._seen.add(key)

    def count_step(self) -> None:
        self._steps += 1

    def reset(self) -> None:
        self._seen.clear()
        self._graphs.clear()

    def give_up(self, error: RuntimeError) -> str:
        if self._steps >= FIRST_STEPS:
            raise error  # steps have been compiled, captured and replayed before
        self.captures = self._compiles = False
        self.reset()
        return "capturing failed with " + " ".join(str(error).split())[:200]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        torch.cuda.synchronize()
        before = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self._on_startup(time.perf_counter() - before)

    def _run_on_stream(self, function: Callable[[], None]) -> None:
        """Run on the stream that will record, so that what libraries keep per stream exists by then."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _recorded(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            # torch refuses a subclass of Generator here; this is a plain one that shares its state
            graph.register_generator_state(generator.graphsafe_get_state())
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._error_mode):
            function()
        return graph
