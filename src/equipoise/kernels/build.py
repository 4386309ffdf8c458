"""Finding the library of CPU kernels: built with the package, or compiled on first use into a cache folder."""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("c")
# OpenMP is only compiled in, not linked: its symbols come from the runtime torch has loaded (see kernels.py),
# so that there is one pool of threads in the process.
FLAGS = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi")


class Unavailable(RuntimeError):
    """There is no kernel library; the message is one line that says why."""


def find() -> Path:
    """Path of the library: `$EQUIPOISE_KERNELS`, the package's own extension, or the cache (compiling if need be)."""
    chosen = os.environ.get("EQUIPOISE_KERNELS", "")
    if chosen == "off":
        raise Unavailable("switched off by EQUIPOISE_KERNELS=off")
    if chosen:
        return Path(chosen)
    return installed() or compiled()


def installed() -> Path | None:
    """The extension `equipoise.kernels._kernels` where the package was built with a compiler at hand."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_kernels" + suffix)
        if path.exists():
            return path
    return None


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def cache_folder() -> Path:
    base = os.environ.get("EQUIPOISE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "equipoise"


def compiled() -> Path:
    """Compile once per source, compiler and flags; a folder of the user's own, replaced atomically."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise Unavailable("no C compiler found: install gcc, or a build of equipoise with kernels")
    flags = [*FLAGS, *os.environ.get("EQUIPOISE_CFLAGS", "").split()]
    digest = hashlib.sha256(_version(compiler).encode() + " ".join(flags).encode())
    for source in (*sources(), SOURCES / "kernels.h"):
        digest.update(source.read_bytes())
    target = cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, flags, target)
    return target


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise Unavailable(f"C compiler {compiler} does not run: {problem}") from None


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            command = [compiler, *flags, "-shared", "-o", str(output), *map(str, sources())]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                first = next(iter(done.stderr.strip().splitlines()), "no message")
                raise Unavailable(f"{compiler} could not build the kernels: {first}")
            os.replace(output, target)
    except OSError as problem:
        raise Unavailable(f"cannot write the kernel cache {target.parent}: {problem}") from None


def openmp_runtime() -> str:
    """The libgomp that torch itself runs on, else the system's."""
    import torch

    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    found = str(bundled[0]) if bundled else ctypes.util.find_library("gomp")
    if not found:
        raise Unavailable("no OpenMP runtime (libgomp) found beside torch or on the system")
    return found
