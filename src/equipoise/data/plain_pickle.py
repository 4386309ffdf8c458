"""Read pickles that hold numpy arrays and plain containers, and nothing that could run code."""

from __future__ import annotations

import _codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np


def _plain_dtype(code: str | bytes, align: object = False, copy: object = False) -> np.dtype[Any]:
    """`numpy.dtype` for numbers and fixed-width text only.

    Python 2 pickles pass `align` as the number 0, about which numpy 2.4.0 to 2.4.4 warn, hence the bools.
    """
    dtype = np.dtype(code.decode("ascii") if isinstance(code, bytes) else code, bool(align), bool(copy))
    if dtype.kind not in "biufcSU":
        raise pickle.UnpicklingError(f"arrays of {dtype} are not admitted")
    return dtype


# numpy's function by the public way to it: its module was renamed in numpy 2.
_reconstruct = np.empty(0).__reduce__()[0]

# All that an array, or the bytes of a Python 3 pickle of protocol 2, ask for by name.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _plain_dtype,
    ("_codecs", "encode"): _codecs.encode,
}


class PlainUnpickler(pickle.Unpickler):
    """An unpickler whose every name outside a short list is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}; only numpy arrays are admitted")
        return _ADMITTED[module, name]


def read_plain_pickle(path: Path) -> Any:
    """The content of a pickle written by Python 2 or 3; Python 2 strings come back as bytes.

    Damaged input makes the pickle machine raise almost anything, so callers catch `Exception`.
    """
    with path.open("rb") as file:
        return PlainUnpickler(file, encoding="bytes").load()
