"""Loss and accuracy of an epoch, summed on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import NonFiniteLoss
from equipoise.world import World

LOSS, CORRECT, IMAGES, FIRST_BAD = range(4)


class Meter:
    """Sums of loss and accuracy, and the first batch whose loss was not finite; nothing is read before it is needed.

    Args:
        device: The device of the sums.
        tally: The function that adds a batch, compiled or not.
    """

    def __init__(self, device: torch.device, tally: Callable[..., None] | None = None) -> None:
        self._tally = tally or add_batch
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._number = torch.zeros((), dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        """Start a new epoch."""
        self._sums.zero_()
        self._sums[FIRST_BAD].fill_(torch.inf)

    def begin_batch(self, number: int) -> None:
        """Set the number of the coming batch."""
        self._number.fill_(number)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch; a CUDA graph can replay this."""
        self._tally(self._sums, self._number, loss, logits, labels)

    def all_reduce(self, world: World) -> Meter:
        """The meter of all processes."""
        if world.alone:
            return self
        total = Meter(self._sums.device)
        total._sums[:FIRST_BAD] = world.all_reduce(self._sums[:FIRST_BAD])
        return total

    def check(self, epoch: int) -> None:
        """Refuse an epoch in which a loss was not finite."""
        bad = float(self._sums[FIRST_BAD])
        if bad != float("inf"):
            raise NonFiniteLoss(
                f"the loss is not finite at batch {int(bad) + 1} of epoch {epoch + 1}; "
                "the last checkpoint is intact, lower the learning rate"
            )

    @property
    def loss(self) -> float:
        return float(self._sums[LOSS] / self._sums[IMAGES])

    @property
    def accuracy(self) -> float:
        return float(self._sums[CORRECT] / self._sums[IMAGES])

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])


@torch.no_grad()
def add_batch(sums: Tensor, number: Tensor, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add the mean loss and the correct predictions of batch `number` to the sums, in place."""
    images = float(len(labels))
    loss = loss.double()
    correct = (logits.argmax(1) == labels).sum().double()
    bad = torch.where(loss.isfinite(), sums[FIRST_BAD], torch.minimum(sums[FIRST_BAD], number))
    sums.copy_(torch.stack([sums[LOSS] + loss * images, sums[CORRECT] + correct, sums[IMAGES] + images, bad]))


def learned_nothing(losses: Sequence[float]) -> bool:
    """Whether a training loss by epoch ends less than 1 % below where it began, after five epochs or more."""
    return len(losses) >= 5 and losses[-1] > 0.99 * losses[0] > 0
