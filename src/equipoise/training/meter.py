"""Sums over the batches of an epoch that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import NonFiniteLoss
from equipoise.world import World


class Meter:
    """Loss, accuracy and the first batch whose loss was not finite; nothing is read before it is needed."""

    def __init__(self, device: torch.device) -> None:
        # loss sum, correct, images, first bad batch
        self.sums = torch.tensor([0.0, 0.0, 0.0, float("inf")], dtype=torch.float64, device=device)

    @torch.no_grad()
    def see(self, batch: int, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        correct = (logits.argmax(1) == labels).sum()
        self.sums[:3] += torch.stack(
            [loss.double() * len(labels), correct.double(), correct.new_tensor(len(labels)).double()]
        )
        self.sums[3] = torch.where(loss.isfinite(), self.sums[3], self.sums[3].clamp(max=batch))

    def of_all(self, world: World) -> Meter:
        """That of all processes together."""
        if world.alone:
            return self
        total = Meter(self.sums.device)
        total.sums[:3] = world.all_reduce(self.sums[:3])
        return total

    def check(self, epoch: int) -> None:
        bad = float(self.sums[3])
        if bad != float("inf"):
            raise NonFiniteLoss(
                f"the loss is not finite at batch {int(bad) + 1} of epoch {epoch + 1}; "
                "the last checkpoint is intact, lower the learning rate"
            )

    @property
    def loss(self) -> float:
        return float(self.sums[0] / self.sums[2])

    @property
    def accuracy(self) -> float:
        return float(self.sums[1] / self.sums[2])

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.copy_(state["sums"])


def learned_nothing(losses: Sequence[float]) -> bool:
    """Whether a training loss by epoch ends less than a hundredth below where it began; in five epochs at least."""
    return len(losses) >= 5 and losses[-1] > 0.99 * losses[0] > 0
