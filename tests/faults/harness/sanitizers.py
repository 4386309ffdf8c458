"""Run the kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
REPORTS = ("AddressSanitizer", "runtime error:", "ThreadSanitizer", "LeakSanitizer")
# Without clones: their resolvers run before a sanitizer is ready. Small maps bypass the caches, like large ones.
FLAGS = "-O0 -g -DEQ_NO_CLONES -DSTREAM_BYTES=4096"
NARROW, WIDE = "-mavx2 -mfma", "-march=x86-64-v4 -mavx512bf16"
BATCH, TURN = 500, 100  # calls, and concurrent runs, in one process
SEED = 1_000_000  # the first call of a process is counted from here for every seed
LIMIT = 1200  # seconds for one process


@dataclass
class Sanitized:
    """Numbers of calls under each sanitizer, and the failures.

    Args:
        calls: Number of calls by sanitizer and kind.
        failures: Reports of a sanitizer, wrong numbers, and exceptions other than `UserError`.
    """

    calls: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def missing() -> str:
    """Return why the sanitizers cannot run here; empty if they can."""
    if not shutil.which("gcc"):
        return "no gcc"
    wanted = ("libasan.so", "libubsan.so", "libtsan.so")
    return "" if all(_runtime(name) for name in wanted) else "gcc has no sanitizers here"


def sanitize(calls: int, runs: int, seed: int, folder: Path, tally: Sanitized | None = None) -> Sanitized:
    """Make random calls of the kernels under all sanitizers.

    Args:
        calls: Number of valid and invalid calls under AddressSanitizer and UndefinedBehaviorSanitizer.
        runs: Number of concurrent runs under ThreadSanitizer.
        seed: Seed of both.
        folder: For the libraries that are built.
        tally: Extended if given.
    """
    tally = tally or Sanitized()
    for first in range(0, calls, BATCH):
        number = seed * SEED + first
        _collect("AddressSanitizer and UBSan", address_sanitizer(min(BATCH, calls - first), number, folder), tally)
    for first in range(0, runs, TURN):
        number = seed * SEED + first
        _collect("ThreadSanitizer", thread_sanitizer(min(TURN, runs - first), number, folder), tally)
    return tally


def address_sanitizer(count: int, seed: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Make calls in a process under AddressSanitizer and UndefinedBehaviorSanitizer."""
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    # without leaks: Python and torch keep memory until the end
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    preload = [_runtime("libasan.so"), _runtime("libubsan.so")]
    return _python("harness.boundary_calls", count, seed, words, folder, flags, preload, options)


def thread_sanitizer(count: int, seed: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Make concurrent calls in a process under ThreadSanitizer."""
    folder.mkdir(parents=True, exist_ok=True)
    threads = folder / "pthread_run.so"
    if not threads.exists():
        source = str(HERE / "pthread_run.c")
        command = ["gcc", "-shared", "-fPIC", "-g", "-fsanitize=thread", "-o", str(threads), source]
        subprocess.run(command, check=True, capture_output=True)
    options = {"TSAN_OPTIONS": "exitcode=66 report_signal_unsafe=0 report_thread_leaks=0"}
    preload = [_runtime("libtsan.so"), str(threads)]
    return _python("harness.concurrent_calls", count, seed, words, folder, "-fsanitize=thread", preload, options)


def _vectors(seed: int) -> str:
    """Flags of the vectors in a process: narrow and wide ones in turn, if the machine has both."""
    information = Path("/proc/cpuinfo")
    has_wide = information.exists() and "avx512_bf16" in information.read_text().split()
    return WIDE if has_wide and (seed // TURN + seed // SEED) % 2 else NARROW


def _runtime(name: str) -> str:
    """Path of a library of gcc; empty if there is none."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip() if os.path.isabs(done.stdout.strip()) else ""


def _python(
    module: str, count: int, seed: int, words: tuple[str, ...], folder: Path, flags: str, preload: list[str],
    options: dict[str, str],
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    environment = {
        **{key: value for key, value in os.environ.items() if key != "EQUIPOISE_KERNELS"},
        **options,
        "EQUIPOISE_CACHE": str(folder),
        "EQUIPOISE_CFLAGS": f"{FLAGS} {_vectors(seed)} {flags}",
        "EQUIPOISE_HUGE_PAGES": "off",  # every buffer is a separate allocation
        "LD_PRELOAD": " ".join(preload),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCE}:{HERE.parents[1] / 'helpers'}:{HERE.parent}",
    }
    command = [sys.executable, "-m", module, str(count), str(seed), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


def reports(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines in which a sanitizer reports something."""
    return [line.strip() for line in done.stderr.splitlines() if any(word in line for word in REPORTS)]


def _collect(name: str, done: subprocess.CompletedProcess[str], tally: Sanitized) -> None:
    said = reports(done)
    lines = done.stdout.strip().splitlines()
    if said or done.returncode or not lines:
        last = (said or done.stderr.strip().splitlines() or ["nothing was printed"])[0]
        tally.failures.append(f"{name}: status {done.returncode}: {last[:300]}")
    if lines:
        found = json.loads(lines[-1])
        tally.failures += [f"{name}: {line}" for line in found["failures"]]
        tally.calls.update({f"{name}: {kind}": number for kind, number in found["calls"].items()})
