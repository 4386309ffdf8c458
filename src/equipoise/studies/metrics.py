"""The numbers of a result that claims are about."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from equipoise.catalogue import Catalogue
from equipoise.studies.results import Epoch, Result

WINDOW = 5  # epochs that `stability` looks at together
VARIANCES = frozenset({"variance", "relative-variance", "variance-perturbed", "variance-everywhere"})
LOWER_IS_BETTER = VARIANCES | {"stability", "epochs-to"}
SHARES = frozenset({"accuracy", "mean-accuracy", "test", "clean", "robust"})
BY_EPOCH = ("accuracy", "mean-accuracy", "stability")  # that can be asked for at an epoch
MEASURED = VARIANCES | {"correlation", "correlation-everywhere"}  # at the weights at the end, after training
Metric = Callable[[Result, int | None, str, float | None], float | None]


def accuracy(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Accuracy at the end of an epoch, the last one by default."""
    chosen = result.epochs[-1] if at is None else next((e for e in result.epochs if e.epoch == at), None)
    return None if chosen is None else chosen.scores.get(score)


def mean_accuracy(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Mean of the accuracies of the epochs up to one, all by default: how fast it is, less noisy than a single epoch.

    At a high learning rate two runs of one recipe and seed differ by several points in single epochs.
    """
    last = result.epochs[-1].epoch if at is None else at
    known = [e.scores[score] for e in result.epochs if e.epoch <= last and score in e.scores]
    return float(np.mean(known)) if len(known) == last else None  # one that is missing would tilt the mean


def on_test(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Accuracy on the test images at the end of training."""
    return result.test.get(score)


def clean(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Accuracy on the clean ones of the images that were attacked after training."""
    return result.robust.get(score, {}).get("clean")


def robust(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Accuracy under attack after training."""
    return result.robust.get(score, {}).get("robust")


def stability(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Noise of the accuracy: deviation from the linear trend of 5 epochs, mean over such windows; lower is better.

    In each window of 5 consecutive epochs a line is fitted by least squares, and the standard deviation about it is
    taken with 5 - 2 degrees of freedom. The trend is left out so that learning fast does not count as being unstable,
    and so are windows in which the learning rate falls by half or more: the jump there is no noise.
    """
    epochs = [e for e in result.epochs if (at is None or e.epoch <= at) and e.scores.get(score) is not None]
    found = [_about_line([e.scores[score] for e in window]) for window in _windows(epochs) if not _decays(window)]
    return float(np.mean(found)) if found else None


def _windows(epochs: Sequence[Epoch]) -> list[Sequence[Epoch]]:
    """So many consecutive epochs, none missing among them."""
    found = [epochs[i : i + WINDOW] for i in range(len(epochs) - WINDOW + 1)]
    return [window for window in found if window[-1].epoch - window[0].epoch == WINDOW - 1]


def _decays(window: Sequence[Epoch]) -> bool:
    rates = [epoch.learning_rate for epoch in window]
    return any(b is not None and a is not None and 2 * b <= a for a, b in pairwise(rates))


def _about_line(values: Sequence[float]) -> float:
    time = np.arange(WINDOW) - (WINDOW - 1) / 2
    centred = np.asarray(values) - np.mean(values)
    residual = centred - (centred @ time) / (time @ time) * time
    return float(np.sqrt((residual**2).sum() / (WINDOW - 2)))


def epochs_to(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """The first epoch that reaches the accuracy `threshold`; infinity where none does; lower is better."""
    if threshold is None:
        return None
    reached = (e.epoch for e in result.epochs if e.scores.get(score, -1.0) >= threshold)
    return float(next(reached, math.inf))


def variance(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Variance of the mini-batch gradient on the final weights, as measured after training; lower is better."""
    return result.measured.get("variance")


def relative_variance(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """That variance as a multiple of the squared norm of the mean gradient; lower is better."""
    return result.measured.get("variance_relative")


def variance_perturbed(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Variance of the mini-batch gradient after noise on the active weights; lower is better."""
    return result.measured.get("variance_old")


def variance_everywhere(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Variance of the mini-batch gradient after noise on all weights, inactive ones too; lower is better."""
    return result.measured.get("variance_old everywhere")


def correlation(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Correlation of the mean gradients before and after noise on the active weights."""
    return result.measured.get("correlation")


def correlation_everywhere(result: Result, at: int | None, score: str, threshold: float | None) -> float | None:
    """Correlation of the mean gradients before and after noise on all weights, inactive ones too."""
    return result.measured.get("correlation everywhere")


METRICS: Catalogue[Metric] = Catalogue(
    "metric",
    {
        "accuracy": accuracy,
        "mean-accuracy": mean_accuracy,
        "test": on_test,
        "clean": clean,
        "robust": robust,
        "stability": stability,
        "epochs-to": epochs_to,
        "variance": variance,
        "relative-variance": relative_variance,
        "variance-perturbed": variance_perturbed,
        "variance-everywhere": variance_everywhere,
        "correlation": correlation,
        "correlation-everywhere": correlation_everywhere,
    },
)
"""What a claim can be about; the functions take a result, an epoch or None, a score and a threshold."""
