"""What `Correction.correct` must know of the backward pass that the caller has run."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from equipoise.correction.active_vector import ActiveVector
from equipoise.correction.model_runner import Runner
from equipoise.correction.modes import Mode
from equipoise.correction.snapshot import RandomState


class Accumulated:
    """Remembers the random state of the caller's forward pass, and `.grad` before its backward pass.

    A hook on the parameters reads `.grad` when a backward pass reaches the first of them: `zero_grad` may be called
    between forward and backward.

    Args:
        runner: Runs the model of the correction.
        mode: Has the active vector of the next correction.
    """

    def __init__(self, runner: Runner, mode: Mode) -> None:
        self._runner = runner
        self._mode = mode
        self._before: tuple[ActiveVector, Tensor] | None = None
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._warned = False
        self.random: RandomState | None = None  # of the forward pass; None if it was not recorded

    def start(self, random: RandomState | None) -> None:
        """Prepare for the next forward and backward pass of the caller.

        Args:
            random: The random state of the forward pass.
        """
        self.random = random
        self._before = None
        self.stop()
        self._handle = register_multi_grad_hook(self._runner.parameters, self._read, mode="any")

    def stop(self) -> None:
        """End the passes of the caller: the passes of the correction are not observed."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _read(self, _: Tensor) -> None:
        vector = self._mode.vector
        found = None if vector is None else self._runner.gradients.read_or_none(vector)
        self._before = None if vector is None or found is None else (vector, found)

    def before(self, vector: ActiveVector) -> Tensor | None:
        """Return what was in `.grad` before the last backward pass; `None` if it was empty."""
        if self._before is None:
            return None
        older, found = self._before
        return found if older is vector else vector.translate(older, found)

    def check_random(self, state: RandomState) -> None:
        """Warn once if the model draws random numbers and the state of its forward pass is not known.

        Args:
            state: The random state before the passes of the correction.
        """
        if self.random is None and not self._warned and not state.is_current():
            self._warned = True
            warnings.warn(
                "the model draws random numbers, such as dropout masks, and the correction draws others; call "
                "before_forward() before the forward pass to use the same",
                stacklevel=4,  # the caller of correct()
            )
