"""`python -m equipoise`, as torchrun needs it."""

import os
import sys

from equipoise.cli import main


def run() -> None:
    """`main`; one of several processes then leaves at once.

    Torch's own threads may outlive Python's end: a process that had finished its work died there once in a while
    ("terminate called without an active exception"), and torchrun took the run for failed.
    """
    try:
        main()
    except SystemExit as end:
        if os.environ.get("WORLD_SIZE", "1") == "1" or end.code not in (0, None):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":  # worker processes import this file too
    run()
