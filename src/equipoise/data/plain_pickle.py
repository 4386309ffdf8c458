"""Read pickles of numpy arrays and plain containers; refuse everything that could run code."""

from __future__ import annotations

import _codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np


def _plain_dtype(code: str | bytes, align: object = False, copy: object = False) -> np.dtype[Any]:
    """`numpy.dtype`, restricted to numbers and fixed-width text.

    Python 2 pickles pass `align` as the number 0; numpy 2.4.0 to 2.4.4 warn about that, hence `bool(align)`.
    """
    dtype = np.dtype(code.decode("ascii") if isinstance(code, bytes) else code, bool(align), bool(copy))
    if dtype.kind not in "biufcSU":
        raise pickle.UnpicklingError(f"arrays of {dtype} are not allowed")
    return dtype


# Obtained from an array, because numpy 2 renamed the private module of this function.
_reconstruct = np.empty(0).__reduce__()[0]

# All names that arrays, and bytes in a Python 3 pickle of protocol 2, refer to.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _plain_dtype,
    ("_codecs", "encode"): _codecs.encode,
}


class PlainUnpickler(pickle.Unpickler):
    """Unpickler that refuses every name outside a short list before importing it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}; only numpy arrays are allowed")
        return _ALLOWED[module, name]


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle written by Python 2 or 3; Python 2 strings are returned as bytes.

    On damaged input the unpickler raises almost anything, so callers must catch `Exception`.
    """
    with path.open("rb") as file:
        return PlainUnpickler(file, encoding="bytes").load()
