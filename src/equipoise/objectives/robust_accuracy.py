"""Robust accuracy: the fraction of images that stay correctly classified under an attack."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError
from equipoise.objectives.attack import PGD, Outcome, fgsm
from equipoise.objectives.gradient_masking import GradientMaskingWarning, masking_caution


@dataclass(frozen=True)
class RobustResult:
    """Accuracy on the same images without and with an attack.

    Attributes:
        clean: Accuracy without the attack, from 0 to 1.
        robust: Accuracy under the attack, from 0 to 1.
        images: Number of images.
        caution: Why `robust` may be too high (gradient masking), or "".
    """

    clean: float
    robust: float
    images: int
    caution: str = ""


Progress = Callable[[RobustResult], None]
"""Called after every batch with the result so far."""


def pgd10(eps: float = 8 / 255) -> PGD:
    """L∞ PGD, 10 steps of 2/255 from a uniform start: the attack of adversarial training."""
    return PGD(eps=eps, steps=10, early_exit=True)


def pgd20(eps: float = 8 / 255) -> PGD:
    """L∞ PGD, 20 steps of 2/255 from a uniform start."""
    return PGD(eps=eps, steps=20, early_exit=True)


def pgd50x10(eps: float = 8 / 255) -> PGD:
    """L∞ PGD, 50 steps of 2.5·ε/50, 10 restarts: the paper's evaluation."""
    step_size = 2.5 * eps / 50 or 1.0  # for eps = 0 any positive step size will do
    return PGD(eps=eps, step_size=step_size, steps=50, restarts=10, early_exit=True)


def l2pgd50x10(eps: float = 128 / 255) -> PGD:
    """L2 PGD, ε 128/255, 50 steps of 2.5·ε/50, 10 restarts."""
    return replace(pgd50x10(eps), norm="l2")


def margin50x10(eps: float = 8 / 255) -> PGD:
    """L∞ PGD as pgd50x10, on the margin between logits, whose gradient does not vanish when logits saturate."""
    return replace(pgd50x10(eps), loss="margin")


ATTACKS: Catalogue[Callable[..., PGD]] = Catalogue(
    "attack",
    {
        "fgsm": fgsm,
        "pgd10": pgd10,
        "pgd20": pgd20,
        "pgd50x10": pgd50x10,
        "l2pgd50x10": l2pgd50x10,
        "margin50x10": margin50x10,
    },
)


class Tally:
    """Counts of correct answers over the batches of an evaluation."""

    def __init__(self) -> None:
        self.images = self.clean = self.robust = 0

    def add(self, correct: Tensor, fooled: Tensor) -> None:
        """Count a batch: an image is robust if it was correct and was not fooled."""
        self.images += len(correct)
        self.clean += int(correct.sum())
        self.robust += int((correct & ~fooled).sum())

    def result(self, caution: str = "") -> RobustResult:
        """Accuracies over the batches so far."""
        if not self.images:
            raise UserError("there are no images to attack; pass at least one batch")
        return RobustResult(self.clean / self.images, self.robust / self.images, self.images, caution)


def robust_accuracy(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    attack: PGD | str,
    generator: torch.Generator | None = None,
    on_progress: Progress | None = None,
    check_masking: bool = True,
) -> RobustResult:
    """Clean accuracy, and accuracy under an attack on the same images.

    An image is fooled if any iterate of any restart is misclassified (see `PGD.search`). The paper, through
    Foolbox, considers only the last iterate of each restart, so this number is never higher than the paper's.

    Args:
        model: The classifier; it is attacked in eval mode and left unchanged.
        batches: Pixels in [0, 1] and labels.
        attack: A `PGD`, or a name from `ATTACKS`.
        generator: Source of the random starts.
        on_progress: Called after every batch with the result so far.
        check_masking: Test the first batch for gradient masking (see `masking_caution`). If it is found, a
            `GradientMaskingWarning` is raised and recorded in the result's `caution`.
    """
    attack = ATTACKS[attack]() if isinstance(attack, str) else attack
    tally, caution = Tally(), ""
    for x, y in batches:
        outcome: Outcome = attack.search(model, x, y, generator)
        if check_masking and not tally.images:
            caution = masking_caution(model, x, y, attack)
        tally.add(outcome.correct, outcome.fooled)
        if on_progress is not None:
            on_progress(tally.result(caution))
    if caution:
        warnings.warn(caution, GradientMaskingWarning, stacklevel=2)
    return tally.result(caution)
