"""Measure the size and speed of an exported file against dense PyTorch and onnxruntime on the same machine."""

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
from equipoise.deploy.custom import read_custom
from equipoise.deploy.loading import with_kernels
from equipoise.deploy.packed_file import read_file, read_packed, stored_values
from equipoise.errors import UserError
from equipoise.runtime.packed_arrays import WEIGHTS
from equipoise.storage.pack import describe

Run = Callable[[], object]
DENSE = ("PyTorch", "PyTorch channels_last")
ONE, MANY = 1, 128
LATENCY_TURNS = 5  # times as many repeats for a single image, because these are short


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        path: The file.
        original: The dense model before it was exported; its weights do not matter.
        model: The dense model with the weights of the file.
        sparse: The same on the sparse kernels.
        input_shape: Shape of one input.
        stored: Numbers in the file.
    """

    path: Path
    original: nn.Module
    model: nn.Module
    sparse: nn.Module
    input_shape: tuple[int, ...]
    stored: int


def packed_subject(path: Path, allow_code: bool = False) -> Subject:
    """Read a file that `equipoise export` wrote; the rivals run the network with its norms folded."""
    found = read_packed(path, allow_code)
    shape = found.blueprint.input_shape
    return Subject(path, found.blueprint.skeleton(), found.model, with_kernels(found.model), shape, found.stored)


def custom_subject(path: Path, into: nn.Module, input_shape: tuple[int, ...]) -> Subject:
    """Read a file that `equipoise.save` wrote.

    Args:
        path: The file.
        into: The custom model as it was before packing.
        input_shape: Shape of one input.

    Raises:
        UserError: If the file does not fit the model, or the model does not take such inputs.
    """
    model = read_custom(path, into)
    try:
        with torch.no_grad():
            model(torch.zeros(1, *input_shape))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"the model does not take an input of {input_shape}: {line}") from None
    sparse = with_kernels(model, torch.preserve_format)
    return Subject(path, into, model, sparse, input_shape, stored_values(read_file(path, WEIGHTS)[1]))


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
        without_onnx: Why onnxruntime is not among the rivals; empty if it is.
    """

    file_bytes: int
    dense_bytes: int
    stored: int
    parameters: int
    layers: int
    sparse_layers: int
    threads: int
    seconds: dict[str, tuple[float, float]]
    without_onnx: str

    @property
    def dense(self) -> tuple[float, float]:
        """Seconds of the faster of PyTorch's layouts, for one image and for 128."""
        one, many = zip(*(self.seconds[name] for name in DENSE), strict=True)
        return min(one), min(many)


def bench(
    subject: Subject,
    repeats: int = 15,
    threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """Measure an exported file. The rivals run the same network with its zeros stored.

    Args:
        subject: The file and its network, see `packed_subject` and `custom_subject`.
        repeats: Repeats of each rival for 128 images; a single image is repeated five times as often.
        threads: Number of threads; torch's present number by default.
        clock: Returns seconds. `time.process_time` does not count what other programs do on a shared machine.
    """
    with using_threads(threads) as count, tempfile.TemporaryDirectory() as folder:
        rivals, without_onnx = make_rivals(subject, Path(folder), count)
        seconds = measure(rivals, subject.input_shape, repeats, clock)
    original = subject.original
    return Report(
        file_bytes=subject.path.stat().st_size,
        dense_bytes=sum(tensor.nbytes for tensor in original.state_dict().values()),
        stored=subject.stored,
        parameters=sum(parameter.numel() for parameter in original.parameters()),
        layers=sum(parameter.dim() > 1 for parameter in original.parameters()),
        sparse_layers=len(describe(subject.sparse)),
        threads=count,
        seconds=seconds,
        without_onnx=without_onnx,
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


def make_rivals(subject: Subject, folder: Path, threads: int) -> tuple[dict[str, Callable[[Tensor], Run]], str]:
    """Return a function by rival that prepares a run on given images, and why onnxruntime is not among them."""
    model = subject.model
    last = cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)
    rivals = {"equipoise": _torch_run(subject.sparse), DENSE[0]: _torch_run(model)}
    rivals[DENSE[1]] = lambda x: _torch_run(last)(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x)
    missing = onnx_model.missing()
    missing += [] if importlib.util.find_spec("onnxruntime") else ["onnxruntime"]
    if missing:
        return rivals, f"{', '.join(missing)} not installed (pip install equipoise[onnx])"
    file = folder / "dense.onnx"
    try:
        onnx_model.write_model(model, subject.input_shape, file)
    except Exception as error:  # the exporter raises anything for a custom model that it cannot trace
        return rivals, f"torch cannot export this model to ONNX ({type(error).__name__})"
    rivals["onnxruntime"] = _onnx_run(file, threads)
    return rivals, ""


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
    # Otherwise its threads keep the cores busy after a run, in the time of the next rival.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def prepare(x: Tensor) -> Run:
        images = {session.get_inputs()[0].name: x.numpy()}
        return lambda: session.run(None, images)

    return prepare


def measure(
    rivals: dict[str, Callable[[Tensor], Run]],
    input_shape: tuple[int, ...],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each rival for one image and for 128."""
    images = torch.rand(MANY, *input_shape, generator=torch.Generator().manual_seed(0))
    singly = {name: make(images[:ONE].clone()) for name, make in rivals.items()}
    one = interleaved(singly, LATENCY_TURNS * repeats, clock)
    many = interleaved({name: make(images) for name, make in rivals.items()}, repeats, clock)
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
