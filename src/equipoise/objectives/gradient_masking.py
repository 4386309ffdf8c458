"""Detect models that look robust only because their gradients are uninformative."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from equipoise.objectives.attack import PGD, under_attack

TOLERATED = 0.1  # fraction of images that may fail a test before it is reported
PROBED = 128  # images


class GradientMaskingWarning(UserWarning):
    """The robust accuracy measured by a gradient attack is likely too high."""


def masking_caution(model: nn.Module, x: Tensor, y: Tensor, attack: PGD) -> str:
    """Reason not to trust a robust accuracy under `attack`, or "" if none was found.

    Tests two necessary conditions of a working attack (Athalye et al. 2018, arXiv:1802.00420; Carlini et al.
    2019, arXiv:1902.06705) on the correctly classified images among the first 128 of a batch:

    1. The gradient of the attack's loss at the image is finite and not exactly zero. With saturated logits,
       float32 cross-entropy has a zero gradient, and the attack does not move.
    2. 20 steps without a bound fool the model: a ball as large as the pixel cube holds images of every class.

    A condition is reported if more than a tenth of the images fail it. The test costs 21 forward-backward passes
    and draws no random numbers. Passing it proves nothing; AutoAttack is a stronger check.
    """
    probe = replace(_unbounded(attack, math.prod(x.shape[1:])), loss="ce" if attack.loss == "kl" else attack.loss)
    x, y = x[:PROBED], y[:PROBED]
    outcome = probe.search(model, x, y)
    correct = int(outcome.correct.sum())
    if not correct:
        return ""
    x, y = x[outcome.correct], y[outcome.correct]
    silent = _without_gradient(model, x, y, probe)
    if silent > TOLERATED * correct:
        return (
            f"the input gradient of the {probe.loss} loss is zero for {silent} of {correct} images, so the attack "
            "cannot move them and robust accuracy is overestimated; use the margin loss or AutoAttack"
        )
    standing = correct - int((outcome.fooled & outcome.correct).sum())
    if standing > TOLERATED * correct:
        return (
            f"{standing} of {correct} images withstand an attack without any bound, so gradients are masked and "
            "robust accuracy is overestimated; use AutoAttack"
        )
    return ""


def _unbounded(attack: PGD, dimension: int) -> PGD:
    eps = 1.0 if attack.norm == "linf" else math.sqrt(dimension)
    return replace(attack, eps=eps, step_size=2.5 * eps / 20, steps=20, restarts=1, start="none", early_exit=True)


def _without_gradient(model: nn.Module, x: Tensor, y: Tensor, attack: PGD) -> int:
    with under_attack(model):
        _, gradient = attack.gradient(model, x, y, x.new_empty(len(x), 0))
    flat = gradient.flatten(1)
    return int(((flat == 0).all(1) | ~torch.isfinite(flat).all(1)).sum())
