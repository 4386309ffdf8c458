"""Measure the size and speed of a packed file against dense PyTorch and onnxruntime on the same machine."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise.deploy import onnx_model
from equipoise.deploy.loading import with_kernels
from equipoise.deploy.packed_file import Unpacked, read_packed
from equipoise.storage.pack import describe

Run = Callable[[], object]
DENSE = ("PyTorch", "PyTorch channels_last")
ONE, MANY = 1, 128
LATENCY_TURNS = 5  # times as many repeats for a single image, because these are short


@dataclass(frozen=True)
class Report:
    """Sizes and timings, as `equipoise bench` prints them.

    Args:
        file_bytes: Size of the packed file.
        dense_bytes: Size of the dense state_dict.
        stored: Numbers in the file.
        parameters: Parameters of the dense model.
        layers: Layers with a weight.
        sparse_layers: Layers that run on the sparse kernels.
        threads: Threads of torch and of the kernels.
        seconds: Median seconds for one image and for 128, by rival.
        missing: Packages that are not installed and that a rival would need.
    """

    file_bytes: int
    dense_bytes: int
    stored: int
    parameters: int
    layers: int
    sparse_layers: int
    threads: int
    seconds: dict[str, tuple[float, float]]
    missing: list[str]

    @property
    def dense(self) -> tuple[float, float]:
        """Seconds of the faster of PyTorch's layouts, for one image and for 128."""
        one, many = zip(*(self.seconds[name] for name in DENSE), strict=True)
        return min(one), min(many)


def bench(path: Path, repeats: int = 15, threads: int | None = None) -> Report:
    """Measure a packed file. The rivals run the same network, with norms folded and zeros stored.

    Args:
        path: A file that `equipoise export` wrote.
        repeats: Repeats of each rival for 128 images; a single image is repeated five times as often.
        threads: Number of threads; torch's present number by default.
    """
    unpacked = read_packed(path)
    skeleton, sparse = unpacked.blueprint.skeleton(), with_kernels(unpacked.model)
    with using_threads(threads) as count, tempfile.TemporaryDirectory() as folder:
        rivals, missing = make_rivals(sparse, unpacked, Path(folder), count)
        seconds = measure(rivals, unpacked.blueprint.input_shape, repeats)
    return Report(
        file_bytes=path.stat().st_size,
        dense_bytes=sum(tensor.nbytes for tensor in skeleton.state_dict().values()),
        stored=unpacked.stored,
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        layers=sum(parameter.dim() > 1 for parameter in skeleton.parameters()),
        sparse_layers=len(describe(sparse)),
        threads=count,
        seconds=seconds,
        missing=missing,
    )


@contextmanager
def using_threads(threads: int | None) -> Iterator[int]:
    """Use `threads` threads in torch and the kernels, or torch's present number; yield the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def make_rivals(
    sparse: nn.Module, unpacked: Unpacked, folder: Path, threads: int
) -> tuple[dict[str, Callable[[Tensor], Run]], list[str]]:
    """Return a function by rival that prepares a run on given images, and the packages that are missing."""
    model = unpacked.model
    last = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    rivals = {"equipoise": _torch_run(sparse), DENSE[0]: _torch_run(model)}
    rivals[DENSE[1]] = lambda x: _torch_run(last)(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x)
    missing = onnx_model.missing()
    missing += [] if importlib.util.find_spec("onnxruntime") else ["onnxruntime"]
    if not missing:
        file = folder / "dense.onnx"
        onnx_model.write_model(model, unpacked.blueprint.input_shape, file)
        rivals["onnxruntime"] = _onnx_run(file, threads)
    return rivals, missing


def _torch_run(model: nn.Module) -> Callable[[Tensor], Run]:
    def prepare(x: Tensor) -> Run:
        def run() -> None:
            with torch.inference_mode():
                model(x)

        return run

    return prepare


def _onnx_run(file: Path, threads: int) -> Callable[[Tensor], Run]:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def prepare(x: Tensor) -> Run:
        images = {session.get_inputs()[0].name: x.numpy()}
        return lambda: session.run(None, images)

    return prepare


def measure(
    rivals: dict[str, Callable[[Tensor], Run]], input_shape: tuple[int, ...], repeats: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each rival for one image and for 128."""
    images = torch.rand(MANY, *input_shape, generator=torch.Generator().manual_seed(0))
    one = interleaved({name: make(images[:ONE].clone()) for name, make in rivals.items()}, LATENCY_TURNS * repeats)
    many = interleaved({name: make(images) for name, make in rivals.items()}, repeats)
    return {name: (one[name], many[name]) for name in rivals}


def interleaved(
    runs: dict[str, Run], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each run. The runs take turns, so that a busy moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn:  # the first turn warms caches and buffers
                times[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in times.items()}
