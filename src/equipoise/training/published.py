"""Deviations of the published code of AGENT from the paper, for comparisons with that code only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.modules import preserved_modes, preserved_values
from equipoise.training.bn_recalibration import norms_of

STATISTICS_BATCHES = 64  # with BatchNorm's momentum of 0.1, older batches make up 0.9^64 = 0.1 % of the statistics


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """Deviations of the published code of AGENT (A-BSR-Net/run_a_brs_net.py) from the paper. All are off by default.

    The coefficient of that code is `correction.coefficient: as_published`, and its augmentation is
    `data.augment: {crop: false, shift: 0.1, fractional: true}`. The overlay `agent-as-published` combines them.

    Args:
        raw_full_pass: Compute g̃ on training images without augmentation, so that g_old and g̃ differ in the mean and
            the correction adds a part of the gradient on raw images.
        bn_trace: Leave the BatchNorm statistics of the full pass in the model, with which it is then scored.
        score: Also score the model after the first step of every epoch, with the statistics that a full pass over raw
            images in training mode leaves: the score `as_published`. An arm without a full pass gets these statistics
            for the score only, so that all arms can be compared.
        raw_gradient: Fraction of the gradient that is taken on the same images without augmentation, without any
            correction: the control for `raw_full_pass`.
    """

    raw_full_pass: bool = False
    bn_trace: bool = False
    score: bool = False
    raw_gradient: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.raw_gradient < 1:
            raise UserError(f"raw_gradient={self.raw_gradient} must be at least 0 and below 1, such as 0.1")

    @property
    def needs_raw_images(self) -> bool:
        return self.raw_full_pass or self.score or self.raw_gradient > 0


@dataclass(frozen=True)
class Shift:
    """A running statistic of BatchNorm, and by how much it is shifted."""

    statistic: Tensor
    by: Tensor


@torch.no_grad()
def raw_shifts(
    model: nn.Module,
    batches: Iterable[Tensor],
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Shift]:
    """Return by how much a pass over raw images changes the statistics that are used one training step later.

    The pass turns a statistic s into r, and the step turns r into (1-m)·r + m·b with its batch statistic b and the
    momentum m of BatchNorm. Without the pass it is (1-m)·s + m·b, so the difference is (1-m)·(r - s).
    The model is left unchanged.
    """
    norms = norms_of(model)
    pairs = [(norm, buffer) for norm in norms for buffer in norm.buffers()]
    before = [buffer.clone() for _, buffer in pairs]
    with preserved_modes(model), autocast():
        model.eval()
        for norm in norms:
            norm.training = True
        for x in batches:
            model(x)
    shifts = []
    for (norm, buffer), old in zip(pairs, before, strict=True):
        if buffer.is_floating_point():
            shifts.append(Shift(buffer, (1 - (norm.momentum or 0.0)) * (buffer - old)))
        buffer.copy_(old)
    return shifts


@contextmanager
def shifted(shifts: list[Shift]) -> Iterator[None]:
    """Shift statistics for the duration of the block."""
    with preserved_values(shift.statistic for shift in shifts):
        for shift in shifts:
            shift.statistic.add_(shift.by)
        yield
