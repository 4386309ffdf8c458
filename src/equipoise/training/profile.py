"""A profile of training steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.training.watchers import Watcher

if TYPE_CHECKING:
    from torch.profiler import profile

    from equipoise.training.trainer import Trainer


class Profiler(Watcher):
    """Writes a trace of a few steps for chrome://tracing or Perfetto.

    It covers the steps between the first two calls of `step`, after compilation.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: profile | None = None
        self._done = False

    def step(self, trainer: Trainer) -> None:
        from torch.profiler import profile

        if self._profile is not None:
            self.end()
        elif not self._done:
            self._profile = profile()
            self._profile.start()

    def end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile, self._done = None, True
