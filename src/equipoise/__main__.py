"""`python -m equipoise`, which torchrun needs."""

import os
import sys

from equipoise.cli import main


def run() -> None:
    """Run `main`. If there are several processes, end a successful one without Python's shutdown.

    Threads of torch can outlive the interpreter. A process that had finished its work sometimes died there
    ("terminate called without an active exception"), and torchrun reported the run as failed.
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
