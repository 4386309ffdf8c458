"""A stand-in for torchvision, which timm imports and which cannot be loaded next to the CPU build of torch."""

from __future__ import annotations

import enum
import importlib.abc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

Interpolation = enum.Enum("Interpolation", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")


class _Module(types.ModuleType):
    """Every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Interpolation if name == "InterpolationMode" else type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == "torchvision"
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def stubbed_torchvision() -> Iterator[None]:
    """Import with the stand-in inside the block; afterwards torchvision is missing again."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
