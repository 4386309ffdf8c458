"""The C kernels as Python functions: loading the library, and describing tensors to it."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import UserError
from equipoise.kernels import build

ABI = 1
LANES = 16


class Map(ctypes.Structure):
    """A blocked activation as the kernels see it: pointer, extent and steps in floats."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("n", "c", "h", "w", "sn", "sc", "sh", "sw"))]


class Norm(ctypes.Structure):
    """Arguments of the fused normalisation kernel; the order is that of `norm_work` in norm.c."""

    _fields_ = [
        ("y", Map),
        ("out", Map),
        ("residual", Map),
        ("images", c_int64),
        ("norm", c_int32),
        ("relu", c_int32),
        ("pool", c_int32),
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
    """One step of an inference program; the order is that of `step` in program.c."""

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
        ("blocks", c_int64),
        ("reach", c_int64),
        ("scale", c_void_p),
        ("shift", c_void_p),
    ]


_MAP = POINTER(Map)
_SIGNATURES: dict[str, list[Any]] = {
    "eq_conv": [_MAP, _MAP, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int32],
    "eq_conv_grad": [_MAP, _MAP, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32],
    "eq_pattern": [c_int64, *[c_void_p] * 7],
    "eq_offsets": [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    "eq_weights": [c_int64, c_void_p, c_void_p, c_void_p],
    "eq_norm": [POINTER(Norm), c_int32],
    "eq_norm_grad": [POINTER(Norm), c_int32],
    "eq_program": [POINTER(Step), c_int64, c_int32],
    "eq_layout": [_MAP, _MAP, c_int32, c_int32],
}


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or the one line that says why there is none."""
    try:
        path = build.find()
        ctypes.CDLL(build.openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path))
        if loaded.eq_abi() != ABI:
            return f"{path.name} was built from another version of equipoise: build the package again"
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, None
    except (build.Unavailable, OSError, AttributeError) as problem:
        return str(problem).splitlines()[0]
    return loaded


def available() -> bool:
    """Whether the CPU kernels can be used; compiles them on first use in a checkout."""
    return not isinstance(_load(), str)


def reason() -> str:
    """Why the kernels are not available, in one line; empty where they are."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else ""


def library() -> ctypes.CDLL:
    """The loaded library; UserError with the reason where there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise UserError(f"the CPU kernels are not available ({loaded}); use masked storage instead")
    return loaded


def threads() -> int:
    """As many as torch uses: both run on one pool."""
    return torch.get_num_threads()


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def describe(tensor: Tensor) -> Map:
    """(n, c, h, w, lanes) with unit step in the last axis, for the kernels."""
    (n, c, h, w, _), (sn, sc, sh, sw, _) = tensor.shape, tensor.stride()
    return Map(tensor.data_ptr(), n, c, h, w, sn, sc, sh, sw)


__all__ = [
    "LANES",
    "Map",
    "Norm",
    "Step",
    "available",
    "byref",
    "describe",
    "library",
    "pointer",
    "reason",
    "threads",
]
