"""AutoAttack, the standard evaluation of robustness, through the optional package pyautoattack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.objectives.attack import PGD, under_attack
from equipoise.objectives.robust_accuracy import Progress, RobustResult, Tally

NORMS = {"linf": "Linf", "l2": "L2"}


def autoattack(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    eps: float = 8 / 255,
    norm: str = "linf",
    version: str = "standard",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> RobustResult:
    """Robust accuracy under AutoAttack (Croce & Hein 2020, arXiv:2003.01690).

    Args:
        model: The classifier; it is attacked in eval mode and left unchanged.
        batches: Pixels in [0, 1] and labels.
        eps: Radius of the perturbation.
        norm: "linf" or "l2".
        version: "standard" runs APGD-CE, targeted APGD-DLR, targeted FAB and Square in sequence, each on the
            images that were not fooled before; "plus" and "rand" are the package's other versions.
        seed: Seed of the attack; the global random state is restored afterwards.
        on_progress: Called after every batch with the result so far.
    """
    if norm not in NORMS:
        raise UserError(f'AutoAttack runs in the norms "linf" and "l2", not "{norm}"')
    if PGD(norm, eps).eps == 0:  # PGD refuses an invalid radius
        raise UserError("AutoAttack needs a radius above 0; at 0 robust accuracy is clean accuracy")
    package = _package()
    tally = Tally()
    for x, y in batches:
        with under_attack(model), _contained(x.device):
            logits = model(x)
            attack = package.AutoAttack(model, norm=NORMS[norm], eps=eps, seed=seed, version=version, device=x.device)
            _fit_classes(attack, logits.shape[1])
            _, predicted = attack.run_standard_evaluation(x, y, batch_size=len(x))
        tally.add(logits.argmax(1) == y, predicted != y)
        if on_progress is not None:
            on_progress(tally.result())
    return tally.result()


def _package() -> Any:
    try:
        return importlib.import_module("pyautoattack")
    except ImportError as error:
        raise UserError('AutoAttack needs the package pyautoattack: pip install "equipoise[autoattack]"') from error


def _fit_classes(attack: Any, classes: int) -> None:
    """Let the targeted attacks aim at 9 wrong classes, or at all of them if there are fewer."""
    if classes < 4:
        raise UserError(f"AutoAttack's targeted loss needs at least 4 classes; the model has {classes}")
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)


@contextmanager
def _contained(device: torch.device) -> Iterator[None]:
    """Undo the side effects of the package: it reseeds torch's global generators and disables `sys.settrace`."""
    tracer = sys.gettrace()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            sys.settrace(tracer)
