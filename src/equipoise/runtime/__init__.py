"""Run exported networks with numpy and the library of C kernels, without torch.

from equipoise.runtime import load

net = load("net.safetensors")
scores = net(images)  # float32 (n, channels, height, width) in [0, 1]
"""

from __future__ import annotations

import os
from typing import Any

from equipoise.checks import as_path, require_classes, require_precision, require_threads
from equipoise.config import build, convert
from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.runtime.calls import Calls, Shape
from equipoise.runtime.network import Network
from equipoise.runtime.packed_arrays import read_arrays

__all__ = ["Network", "UserError", "load"]


def load(path: str | os.PathLike[str], threads: int | None = None, precision: str = "float32") -> Network:
    """Load a network for inference on the CPU kernels. No code in the file is executed.

    Args:
        path: A file that `equipoise export` wrote.
        threads: Number of threads, at most 1024; by default as many as OpenMP would use, and 1 without libgomp.
        precision: `bf16` stores activations between layers in bfloat16, in batches of more than 16 images. Sums are
            float32, and so is the output.

    Returns:
        The network. `net(images)` returns the scores of float32 images of the shape (n, *net.input_shape) with pixels
        in [0, 1]. `net.classes` are the names of the classes, empty if unknown.

    Raises:
        UserError: If the file is missing, damaged, was written without a program, or would take too much memory, or if
            the kernels are not available, or there is no such precision or number of threads.
    """
    if threads is not None:
        require_threads(threads)
    require_precision(precision)
    file = as_path(path)
    header, tensors = read_arrays(file)
    if header.get("program") is None:
        raise UserError(
            f"{file} has no program for the runtime without torch; export it again, or use equipoise.load if its "
            "model has operations that C source does not have"
        )
    if not library.available():
        raise UserError(f"the CPU kernels are not available: {library.reason()}")
    try:
        calls = build(Calls, convert(header["program"], dict[str, Any], "program"), "program")
        calls.check()
        network = convert(header.get("network"), dict[str, Any], "network")
        shape = convert(network.get("input_shape"), tuple[int, ...], "input_shape")
        if shape not in (calls.image, calls.image[:1]) or calls.image[len(shape) :] not in ((), (1, 1)):
            raise UserError(f"input_shape={list(shape)} is not the image of the program, {list(calls.image)}")
        classes = convert(network.get("classes", []), tuple[str, ...], "classes")
        require_classes(classes, Shape(*calls.calls[calls.result].shape).size)
        return Network(calls, tensors, shape, classes, threads or library.openmp_threads(), precision == "bf16")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
