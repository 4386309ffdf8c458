"""The numbers of a result that claims are about."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from equipoise.catalogue import Catalogue
from equipoise.study.results import Result

WINDOW = 5  # epochs that `stability` looks at together
LOWER_IS_BETTER = frozenset({"stability", "epochs-to", "variance", "relative-variance"})
MEASURED = frozenset({"variance", "relative-variance", "correlation"})  # at the weights at the end, after training
Metric = Callable[[Result, int | None, str, float | None], float | None]


def accuracy(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Accuracy at the end of an epoch, the last one by default."""
    chosen = result.epochs[-1] if at is None else next((e for e in result.epochs if e.epoch == at), None)
    return None if chosen is None else chosen.scores.get(way)


def mean_accuracy(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Mean of the accuracies of the epochs up to one, all by default: how fast it is, less noisy than a single epoch.

    At a high learning rate two runs of one recipe and seed differ by several points in single epochs.
    """
    values = [e.scores.get(way) for e in result.epochs if at is None or e.epoch <= at]
    known = [value for value in values if value is not None]
    short = at is not None and result.epochs[-1].epoch < at
    return None if short or not known or len(known) < len(values) else float(np.mean(known))


def on_test(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Accuracy on the test images at the end of training."""
    return result.test.get(way)


def clean(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Accuracy on the clean ones of the images that were attacked after training."""
    return result.robust.get(way, {}).get("clean")


def robust(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Accuracy under attack after training."""
    return result.robust.get(way, {}).get("robust")


def stability(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Noise of the accuracy: deviation from the linear trend of 5 epochs, mean over such windows; lower is better.

    In each window of 5 consecutive epochs a line is fitted by least squares, and the standard deviation about it is
    taken with 5 - 2 degrees of freedom. The trend is left out so that learning fast does not count as being unstable.
    """
    values = [y for e in result.epochs if (at is None or e.epoch <= at) and (y := e.scores.get(way)) is not None]
    if len(values) < WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values), WINDOW)
    time = np.arange(WINDOW) - (WINDOW - 1) / 2
    centred = windows - windows.mean(axis=1, keepdims=True)
    residual = centred - np.outer(centred @ time / (time @ time), time)
    return float(np.sqrt((residual**2).sum(axis=1) / (WINDOW - 2)).mean())


def epochs_to(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """The first epoch that reaches the accuracy `threshold`; infinity where none does; lower is better."""
    if threshold is None:
        return None
    reached = (e.epoch for e in result.epochs if e.scores.get(way, -1.0) >= threshold)
    return float(next(reached, math.inf))


def variance(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Variance of the mini-batch gradient on the final weights, as measured after training; lower is better."""
    return result.measured.get("variance")


def relative_variance(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """That variance as a multiple of the squared norm of the mean gradient; lower is better."""
    return result.measured.get("variance_relative")


def correlation(result: Result, at: int | None, way: str, threshold: float | None) -> float | None:
    """Correlation of the gradients before and after the final weights are perturbed, as measured after training."""
    return result.measured.get("correlation")


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
        "correlation": correlation,
    },
)
"""What a claim can be about; the functions take a result, an epoch or None, a way and a threshold."""
