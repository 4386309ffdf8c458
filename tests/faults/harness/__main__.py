"""The command line of the harness."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

DESCRIPTION = """\
Kill runs, feed wrong input, and run threads and processes at the same time. Everything is drawn from --seed, except the
moments of kills from outside. With --minutes, or if it is stopped by SIGTERM or Ctrl-C, the campaign ends early: what
it has found so far is written next to the page, and the page of the last complete campaign is kept.
"""


def main() -> int:
    import torch  # not above: every process that is killed imports this module first

    from harness.campaign import PARTS, Found, run_campaign, until_a_signal, write_page

    parser = argparse.ArgumentParser(
        prog="harness", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="number of kills with SIGKILL")
    parser.add_argument("--inputs", type=int, default=20_000, help="number of wrong inputs")
    parser.add_argument("--concurrent", type=int, default=500, help="number of concurrent runs")
    parser.add_argument("--calls", type=int, default=3000, help="number of kernel calls under AddressSanitizer")
    parser.add_argument("--threads", type=int, default=500, help="number of concurrent runs under ThreadSanitizer")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no work after so many minutes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="the page to write")
    parser.add_argument("--overwrite", action="store_true", help="write the page even if stopped early")
    asked = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    date = datetime.now(UTC).date().isoformat()
    found = Found(asked.seed, environment=f"{date}, {versions}, {asked.jobs} processes at a time")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, until_a_signal(found):
        counts = {part: getattr(asked, part) for part in PARTS}
        run_campaign(found, counts, asked.jobs, Path(folder), asked.minutes)
    found.seconds = time.monotonic() - started
    print(found.tally, *found.tally.failures, sep="\n")
    if asked.page is not None:
        print(f"written: {write_page(found, asked.page, asked.overwrite)}")
    return 1 if found.tally.failures or found.cut_short else 0


if __name__ == "__main__":
    sys.exit(main())
