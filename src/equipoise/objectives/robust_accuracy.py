"""Robust accuracy: the share of images that an attack cannot get misclassified."""

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
    """Accuracy on the same images before and under attack, as shares of 1."""

    clean: float
    robust: float
    images: int
    caution: str = ""
    """Why `robust` may be too high (gradient masking), or empty."""


Progress = Callable[[RobustResult], None]
"""Called after every batch with the result so far."""


def pgd10(eps: float = 8 / 255) -> PGD:
    """L∞ PGD, 10 steps of 2/255 from a uniform start: what adversarial training trains against."""
    return PGD(eps=eps, steps=10, early_exit=True)


def pgd20(eps: float = 8 / 255) -> PGD:
    """L∞ PGD, 20 steps of 2/255 from a uniform start."""
    return PGD(eps=eps, steps=20, early_exit=True)


def pgd50x10(eps: float = 8 / 255) -> PGD:
    """L∞ PGD, 50 steps of 2.5·ε/50, 10 restarts: the paper's evaluation."""
    step_size = 2.5 * eps / 50 or 1.0  # with no room to move, any step will do
    return PGD(eps=eps, step_size=step_size, steps=50, restarts=10, early_exit=True)


def l2pgd50x10(eps: float = 128 / 255) -> PGD:
    """L2 PGD, ε 128/255, 50 steps of 2.5·ε/50, 10 restarts."""
    return replace(pgd50x10(eps), norm="l2")


def margin50x10(eps: float = 8 / 255) -> PGD:
    """L∞ PGD as pgd50x10, on the margin between logits, which saturation does not silence."""
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
    """Counts of right answers over the batches of an evaluation."""

    def __init__(self) -> None:
        self.images = self.clean = self.robust = 0

    def add(self, correct: Tensor, fooled: Tensor) -> None:
        """Count a batch: an image is robust when it was correct and is not fooled."""
        self.images += len(correct)
        self.clean += int(correct.sum())
        self.robust += int((correct & ~fooled).sum())

    def result(self, caution: str = "") -> RobustResult:
        """The accuracies so far."""
        if not self.images:
            raise UserError("there are no images to attack: the batches are empty")
        return RobustResult(self.clean / self.images, self.robust / self.images, self.images, caution)


def robust_accuracy(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    attack: PGD | str,
    generator: torch.Generator | None = None,
    on_progress: Progress | None = None,
    check_masking: bool = True,
) -> RobustResult:
    """Clean accuracy, and accuracy under `attack` (a PGD, or a name from ATTACKS) on the same images.

    An image is fooled when any iterate of any restart is misclassified (see `PGD.search`); the paper, through
    Foolbox, looks at the last iterate of each restart only, so this is never the higher number of the two.
    The first batch is also tested for gradient masking (see `masking_caution`), which raises a
    `GradientMaskingWarning` and is kept in the result's `caution`.
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
