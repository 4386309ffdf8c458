"""Children that are forked while a thread of their parent computes."""

from __future__ import annotations

import os
import signal
import threading

import torch
from torch import Tensor, nn


def assert_forks_compute(model: nn.Module, small: Tensor, large: Tensor, times: int) -> None:
    """Each child computes the output of `small` as its parent does, which works on `large` in a thread."""
    stop = threading.Event()

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    def compute() -> None:
        while not stop.is_set():
            run(large)

    expected = run(small)
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(times):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)  # ends a child that waits for a thread it does not have
                os._exit(0 if torch.equal(run(small), expected) else 3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, f"the child ended with {status}"
    finally:
        stop.set()
        thread.join()
