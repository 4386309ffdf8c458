"""The library of C kernels: its structures and signatures, and loading it. The runtime uses it without torch."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from equipoise.errors import UserError
from equipoise.kernels import build

ABI = 10  # EQ_ABI in kernels.h
LANES = 16  # words of 4 bytes side by side: the numbers of 16 images in float32, of 32 in bf16
CHUNK = 64  # of tokens, in linear_tiles.h


class Map(ctypes.Structure):
    """A blocked activation for the kernels: pointer, extent and steps in words of 4 bytes; `map` in kernels.h."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("n", "c", "h", "w", "sn", "sc", "sh", "sw"))]


class Norm(ctypes.Structure):
    """Arguments of the fused normalisation kernel, in the order of `norm_work` in norm.c."""

    _fields_ = [
        ("y", Map),
        ("out", Map),
        ("residual", Map),
        ("images", c_int64),
        ("norm", c_int32),
        ("relu", c_int32),
        ("pool", c_int32),
        ("half", c_int32),
        ("eps", c_float),
        ("momentum", c_float),
        ("gamma", c_void_p),
        ("beta", c_void_p),
        ("running_mean", c_void_p),
        ("running_var", c_void_p),
        ("mean", c_void_p),
        ("inv", c_void_p),
        ("dy", Map),
        ("dresidual", Map),
        ("dout", Map),
        ("dgamma", c_void_p),
        ("dbeta", c_void_p),
    ]


class Step(ctypes.Structure):
    """One step of an inference program, in the order of `step` in program.c."""

    _fields_ = [
        ("x", Map),
        ("y", Map),
        ("residual", Map),
        ("kind", c_int32),
        ("lanes", c_int32),
        ("relu", c_int32),
        ("pool", c_int32),
        ("taps", c_void_p),
        ("start", c_void_p),
        ("offset", c_void_p),
        ("weights", c_void_p),
        ("blocks", c_int64),
        ("reach", c_int64),
        ("scale", c_void_p),
        ("shift", c_void_p),
        ("window", c_int32 * 8),  # kernel, stride, padding, dilation
        ("mean", c_int32),
        ("count_padding", c_int32),
        ("half", c_int32),
    ]


_MAP = POINTER(Map)
_SIGNATURES: dict[str, list[Any]] = {
    "eq_conv": [_MAP, _MAP, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int32, c_int32],
    "eq_conv_grad": [_MAP, _MAP, *[c_void_p] * 3, c_int64, c_int64, c_void_p, c_void_p, c_int32, c_int32],
    "eq_conv_back": [_MAP, _MAP, _MAP, *[c_void_p] * 3, c_int64, c_int64, c_void_p, c_void_p, c_int32],
    "eq_level": [],
    "eq_linear": [c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_int64, c_void_p, c_int32],
    "eq_linear_grad": [
        *[c_void_p] * 2,
        *[c_int64] * 3,
        *[c_void_p] * 3,
        c_int64,
        *[c_void_p] * 4,
        c_int64,
        c_void_p,
        c_int32,
    ],
    "eq_pattern": [c_int64, *[c_void_p] * 7],
    "eq_offsets": [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    "eq_find_blocks": [c_int64, *[c_void_p] * 6],
    "eq_block_weights": [c_int64, c_int64, *[c_void_p] * 4, c_int32],
    "eq_block_conv": [_MAP, _MAP, *[c_void_p] * 3, c_int64, c_int64, c_void_p, c_int32, c_int32, c_int32],
    "eq_block_input_grad": [_MAP, _MAP, *[c_void_p] * 3, c_int64, c_void_p, c_void_p, c_int32, c_int32],
    "eq_block_grad": [_MAP, _MAP, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_int32],
    "eq_weights": [c_int64, c_void_p, c_void_p, c_void_p],
    "eq_norm": [POINTER(Norm), c_int32],
    "eq_norm_grad": [POINTER(Norm), c_int32],
    "eq_program": [POINTER(Step), c_int64, c_int32],
    "eq_layout": [_MAP, _MAP, c_int32, c_int32, c_int32],
    "eq_spread": [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32, c_int32],
    "eq_gather": [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32, c_int32],
}
# Functions that return whether they ran out of memory
_ALLOCATING = {
    "eq_conv",
    "eq_conv_grad",
    "eq_conv_back",
    "eq_block_input_grad",
    "eq_linear",
    "eq_linear_grad",
    "eq_pattern",
    "eq_program",
}
_RESULTS = {"eq_find_blocks": c_int64, "eq_level": c_int32, "eq_spread": c_int32, "eq_gather": c_int32}


@functools.cache
def _find() -> ctypes.CDLL | str:
    """The library, or one line that says why there is none."""
    try:
        if (openmp := build.openmp_runtime()) is not None:
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        path = build.find()
        try:
            return open_library(path)
        except build.Unavailable:
            if path != build.installed():
                raise
            return open_library(build.compiled())  # the extension was left by another version
    except (build.Unavailable, OSError, AttributeError) as problem:
        return str(problem).splitlines()[0]


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions.

    Raises:
        Unavailable: If the library was built from another version of the sources.
    """
    loaded = ctypes.CDLL(str(path))
    if loaded.eq_abi() != ABI:
        raise build.Unavailable(f"{path.name} was built from another version of equipoise: build the package again")
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
        if name in _ALLOCATING:
            function.restype = _check_memory
    return loaded


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("there is no memory for the sums of a kernel; use a smaller batch")


def available() -> bool:
    """Return whether the CPU kernels can be used. The first call in a checkout compiles them."""
    return not reason()


# A constant for torch.compile: `torch.compiler.assume_constant_result` sets this too, but imports the compiler first.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reason() -> str:
    """Return why the CPU kernels are not available, in one line; empty if they are."""
    found = _find()
    return found if isinstance(found, str) else ""


def load() -> ctypes.CDLL:
    """Return the library, loaded once per process.

    Raises:
        UserError: If the kernels are not available; the message says why.
    """
    found = _find()
    if isinstance(found, str):
        raise UserError(f"the CPU kernels are not available ({found}); use masked storage instead")
    return found


@functools.cache
def has_bf16() -> bool:
    """Return whether library and machine have the instructions of AVX512-BF16."""
    return bool(load().eq_level() == 2)


def threads() -> int:
    """Return torch's number of threads: the kernels run on the same pool."""
    import torch

    return torch.get_num_threads()


def openmp_threads() -> int:
    """Return the number of threads that OpenMP would use, `OMP_NUM_THREADS` included; 1 without an OpenMP runtime."""
    name = build.openmp_runtime()
    return 1 if name is None else int(ctypes.CDLL(name).omp_get_max_threads())
