"""Accuracy of a model, and of the same model scored three ways."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.topology.ema import EMA, weights_of
from equipoise.training.bn_recalibration import reestimated
from equipoise.world import ALONE, World

Batches = Iterable[tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and the share of images classified rightly."""

    loss: float
    accuracy: float
    images: int


@torch.no_grad()
def score(model: nn.Module, batches: Batches, autocast: Autocast = nullcontext, world: World = ALONE) -> Score:
    """Evaluate in eval mode; the training flags come back as they were. Of several processes each has its batches."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    loss = correct = torch.zeros(())
    images = 0
    try:
        for x, y in batches:
            with autocast():
                logits = model(x)
            loss = loss.to(x.device) + F.cross_entropy(logits.float(), y, reduction="sum")
            correct = correct.to(x.device) + (logits.argmax(1) == y).sum()
            images += len(y)
    finally:
        for module, flag in flags.items():
            module.training = flag
    if not world.alone:
        loss, correct, total = world.all_reduce(
            torch.stack([loss.double(), correct.double(), loss.new_tensor(images).double()])
        )
        images = int(total)
    return Score(float(loss) / max(images, 1), float(correct) / max(images, 1), images)


def three_ways(
    model: nn.Module,
    fresh: Callable[[], Iterable[Tensor]],
    average: EMA | None = None,
    autocast: Autocast = nullcontext,
) -> Generator[str]:
    """The model put in three states, one after the other; the caller measures it in each.

    `plain`: as it stands. `reestimated`: BatchNorm statistics from `fresh` training images. `averaged`: averaged
    weights with re-estimated statistics. Side by side, because an arm of a comparison that gets one of these for free
    looks better than it is.
    """
    yield "plain"
    with reestimated(model, fresh(), autocast):
        yield "bn_recalibrated"
    if average is not None:
        with weights_of(model, average.values), reestimated(model, fresh(), autocast):
            yield "ema"


def score_three_ways(
    model: nn.Module,
    test: Callable[[], Batches],
    fresh: Callable[[], Iterable[Tensor]],
    average: EMA | None = None,
    autocast: Autocast = nullcontext,
    world: World = ALONE,
) -> dict[str, Score]:
    """The score of the model in each of its three states."""
    with closing(three_ways(model, fresh, average, autocast)) as ways:  # closed, the model is itself again
        return {way: score(model, test(), autocast, world) for way in ways}
