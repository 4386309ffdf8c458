"""Work that is the same at every step, recorded once as a CUDA graph and then replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch


class Graphs:
    """Runs functions of no argument: once as they are, from then on as a recorded graph.

    The first run is a real one. It compiles, tunes and allocates what recording must not; recording runs nothing.
    A function reads and writes tensors that stay where they are. `generators` are what it may draw from; their
    seeds can be set between replays. Where `record` is false, functions are always run as they are. `started` is told
    the seconds of each first run and each recording.
    """

    def __init__(
        self,
        device: torch.device,
        generators: list[torch.Generator],
        record: bool,
        started: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._started = started
        self._generators = generators
        self._record = record
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device) if record else None
        self._pool = torch.cuda.graph_pool_handle() if record else None

    def __call__(self, key: Hashable, function: Callable[[], None]) -> None:
        if not self._record:
            function()
        elif key in self._graphs:
            self._graphs[key].replay()
        elif key in self._seen:
            with self._timed():
                self._graphs[key] = self._recorded(function)
            self._graphs[key].replay()
        else:
            with self._timed():
                self._run_aside(function)
            self._seen.add(key)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        torch.cuda.synchronize()
        before = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self._started(time.perf_counter() - before)

    def _run_aside(self, function: Callable[[], None]) -> None:
        """On the stream that will record, so that what libraries keep per stream is there by then."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _recorded(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        return graph
