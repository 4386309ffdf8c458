"""The command line of the harness."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from harness.campaign import Found, call_kernels, feed, kill, kill_pairs, run_threads, until_a_signal, write_page

DESCRIPTION = """\
Kill runs and feed wrong input. Everything is drawn from --seed, except the moments of kills from outside.
SIGTERM and Ctrl-C stop the harness early: what it has found so far is written next to the page, and the page of the
last complete campaign is kept.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="harness", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="number of runs to kill")
    parser.add_argument("--pairs", type=int, default=20, help="number of runs in two processes to kill")
    parser.add_argument("--inputs", type=int, default=10_000, help="number of wrong inputs")
    parser.add_argument("--calls", type=int, default=3000, help="number of kernel calls under AddressSanitizer")
    parser.add_argument("--threads", type=int, default=300, help="number of concurrent runs under ThreadSanitizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="the page to write")
    parser.add_argument("--overwrite", action="store_true", help="write the page even if stopped early")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    found = Found(asked.seed, environment=f"{datetime.now(UTC).date().isoformat()}, {versions}, one CPU core")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, until_a_signal(found):
        parts = {"kills": kill, "pairs": kill_pairs, "inputs": feed, "calls": call_kernels, "threads": run_threads}
        for name, work in parts.items():
            if count := getattr(asked, name):
                work(count, found, Path(folder) / name)
    found.seconds = time.monotonic() - started
    print(*found.failures, sep="\n")
    if asked.page is not None:
        print(f"written: {write_page(found, asked.page, asked.overwrite)}")
    return 1 if found.failures or found.cut_short else 0


if __name__ == "__main__":
    sys.exit(main())
