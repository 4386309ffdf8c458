"""Find the library of CPU kernels: built with the package, or compiled on first use into a cache folder.

`setup.py` runs this file for its flags, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).with_name("c")
NAME = "_kernels.so"  # of the library that is built with the package
SYSTEM_OPENMP = "libgomp.so.1"
# OpenMP is compiled in but not linked: its symbols come from the runtime that torch has loaded (see library.py),
# so that the process has one pool of threads. Without a runtime the kernels run in one thread (see threads.c).
FLAGS = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi")


class Unavailable(RuntimeError):
    """There is no kernel library; the message says why in one line."""


def find() -> Path:
    """Return the path of the library: `$EQUIPOISE_KERNELS`, the one built with the package, or the cached build.

    Raises:
        Unavailable: If the kernels are switched off or cannot be compiled.
    """
    chosen = os.environ.get("EQUIPOISE_KERNELS", "")
    if chosen == "off":
        raise Unavailable("switched off by EQUIPOISE_KERNELS=off")
    if chosen:
        return Path(chosen)
    return installed() or compiled()


def installed() -> Path | None:
    """Return the library that was built with the package, or `None` if there was no compiler."""
    path = Path(__file__).with_name(NAME)
    return path if path.exists() else None


def compiled() -> Path:
    """Compile the kernels into the user's cache folder, once per source, compiler and flags."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise Unavailable("no C compiler found: install gcc, or a build of equipoise with kernels")
    flags = [*FLAGS, *os.environ.get("EQUIPOISE_CFLAGS", "").split()]
    digest = hashlib.sha256(_version(compiler).encode() + " ".join(flags).encode())
    for source in (*_sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    target = _cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, flags, target)
    return target


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def _cache_folder() -> Path:
    base = os.environ.get("EQUIPOISE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "equipoise"


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise Unavailable(f"C compiler {compiler} does not run: {problem}") from None


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    """Compile in a temporary folder, so that no other process sees half a library."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            objects = [str(Path(folder, source.name).with_suffix(".o")) for source in _sources()]
            linked = [flag for flag in flags if flag != "-fopenmp"]  # which would link libgomp
            for command in (
                [compiler, *flags, "-c", *map(str, _sources())],
                [compiler, *linked, "-shared", "-o", str(output), *objects],
            ):
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                if done.returncode:
                    first = next(iter(done.stderr.strip().splitlines()), "no message")
                    raise Unavailable(f"{compiler} could not build the kernels: {first}")
            os.replace(output, target)
    except OSError as problem:
        raise Unavailable(f"cannot write the kernel cache {target.parent}: {problem}") from None


def openmp_runtime() -> str | None:
    """Return the libgomp of torch if torch is installed, else that of the system, else `None`.

    A process that uses the kernels and then imports torch thus has one pool of threads.
    """
    found = find_spec("torch")
    folders = (found.submodule_search_locations if found else None) or ()
    bundled = sorted(path for folder in folders for path in Path(folder, "lib").glob("libgomp*.so*"))
    for name in (*map(str, bundled[:1]), SYSTEM_OPENMP):
        with suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None
