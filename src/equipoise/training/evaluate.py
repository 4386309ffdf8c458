"""Accuracy of a model, and its three scores: plain, bn_recalibrated and ema."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.modules import preserved_modes
from equipoise.topology.ema import EMA, weights_of
from equipoise.training.bn_recalibration import bn_recalibrated
from equipoise.world import ALONE, World

Batches = Iterable[tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    Args:
        loss: Mean cross-entropy.
        accuracy: Fraction of the images that are classified correctly.
        images: Number of images.
    """

    loss: float
    accuracy: float
    images: int


@torch.no_grad()
def score(model: nn.Module, batches: Batches, autocast: Autocast = nullcontext, world: World = ALONE) -> Score:
    """Evaluate a model in evaluation mode; its modes are restored afterwards.

    Args:
        model: The model.
        batches: Images and labels; with several processes, the share of this one.
        autocast: Makes the context of the forward passes.
        world: The processes over which the score is summed up.
    """
    loss = correct = torch.zeros(())
    images = 0
    with preserved_modes(model):
        model.eval()
        for x, y in batches:
            with autocast():
                logits = model(x)
            loss = loss.to(x.device) + F.cross_entropy(logits.float(), y, reduction="sum")
            correct = correct.to(x.device) + (logits.argmax(1) == y).sum()
            images += len(y)
    if not world.alone:
        loss, correct, total = world.all_reduce(
            torch.stack([loss.double(), correct.double(), loss.new_tensor(images).double()])
        )
        images = int(total)
    return Score(float(loss) / max(images, 1), float(correct) / max(images, 1), images)


def three_ways(
    model: nn.Module,
    images: Callable[[], Iterable[Tensor]],
    ema: EMA | None = None,
    autocast: Autocast = nullcontext,
) -> Generator[str]:
    """Put a model into the state of each score in turn, and yield the name of the score.

    `plain` is the model as it is, `bn_recalibrated` has BatchNorm statistics recomputed from training images, and
    `ema` has averaged weights and recomputed statistics. All three are reported, because an arm of a comparison that
    gets one of them for free looks better than it is.

    Args:
        model: The model. Closing the generator restores it.
        images: Returns the training images that statistics are recomputed from.
        ema: The averaged weights; without them there is no `ema` score.
        autocast: Makes the context of the forward passes that recompute statistics.
    """
    yield "plain"
    with bn_recalibrated(model, images(), autocast):
        yield "bn_recalibrated"
    if ema is not None:
        with weights_of(model, ema.values), bn_recalibrated(model, images(), autocast):
            yield "ema"


def score_three_ways(
    model: nn.Module,
    test: Callable[[], Batches],
    images: Callable[[], Iterable[Tensor]],
    ema: EMA | None = None,
    autocast: Autocast = nullcontext,
    world: World = ALONE,
) -> dict[str, Score]:
    """Evaluate a model in the state of each score, see `three_ways` and `score`."""
    with closing(three_ways(model, images, ema, autocast)) as names:  # an error leaves the model restored
        return {name: score(model, test(), autocast, world) for name in names}
