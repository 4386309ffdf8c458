"""The numbers of a result that claims are about."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from equipoise.catalogue import Catalogue
from equipoise.studies.results import Epoch, Question, Result

WINDOW = 5  # consecutive epochs of `window-accuracy`, and those over which `stability` fits a line
SHARES = frozenset({"accuracy", "mean-accuracy", "window-accuracy", "test", "clean", "robust"})  # between 0 and 1
IN_PERCENT = SHARES | {"stability"}  # in tables
BY_EPOCH = ("accuracy", "mean-accuracy", "window-accuracy", "stability")  # known at every epoch
MEASURED = {  # at the final weights, after training: the key in `Result.measured`, and a description
    "variance": ("variance", "Variance of the batch gradient; lower is better."),
    "relative-variance": ("variance_relative", "Variance over the squared mean gradient; lower is better."),
    "variance-perturbed": ("variance_old", "Variance after noise on the active weights; lower is better."),
    "variance-everywhere": ("variance_old everywhere", "Variance after noise on all weights; lower is better."),
    "correlation": ("correlation", "Correlation of the mean gradients before and after noise on the active weights."),
    "correlation-everywhere": ("correlation everywhere", "The same correlation with noise on all weights."),
}
LOWER_IS_BETTER = {"stability", "epochs-to", *(name for name in MEASURED if "variance" in name)}
Metric = Callable[[Result, Question], float | None]


def accuracy(result: Result, question: Question) -> float | None:
    """Accuracy at the end of an epoch, by default the last one."""
    at = result.epochs[-1].epoch if question.at is None else question.at
    return next((e.scores.get(question.score) for e in result.epochs if e.epoch == at), None)


def mean_accuracy(result: Result, question: Question) -> float | None:
    """Mean accuracy over the first epochs, by default all: speed of learning, less noisy than a single epoch.

    At a high learning rate two runs of one recipe and seed differ by several points in single epochs.
    """
    last = result.epochs[-1].epoch if question.at is None else question.at
    return _mean_over(result, question, range(1, last + 1))


def window_accuracy(result: Result, question: Question) -> float | None:
    """Mean accuracy over the last 5 epochs up to `at`, by default up to the end: less noisy than a single epoch."""
    last = result.epochs[-1].epoch if question.at is None else question.at
    return _mean_over(result, question, range(last - WINDOW + 1, last + 1))


def _mean_over(result: Result, question: Question, epochs: range) -> float | None:
    """Return the mean accuracy over epochs; `None` if one of them is missing, which would bias the mean."""
    known = [e.scores[question.score] for e in result.epochs if e.epoch in epochs and question.score in e.scores]
    return float(np.mean(known)) if len(known) == len(epochs) else None


def on_test(result: Result, question: Question) -> float | None:
    """Accuracy on the test images at the end of training."""
    return result.test.get(question.score)


def clean(result: Result, question: Question) -> float | None:
    """Accuracy after training on the clean versions of the attacked images."""
    return result.robust.get(question.score, {}).get("clean")


def robust(result: Result, question: Question) -> float | None:
    """Accuracy under attack after training."""
    return result.robust.get(question.score, {}).get("robust")


def stability(result: Result, question: Question) -> float | None:
    """Noise of the accuracy: deviation from a linear trend over 5 epochs, mean over all windows; lower is better.

    A line is fitted by least squares to each window of 5 consecutive epochs. The standard deviation about it has
    5 - 2 degrees of freedom. Removing the trend keeps fast learning from counting as noise. Windows in which the
    learning rate falls by half or more are skipped, because the accuracy jumps there.
    """
    until = math.inf if question.at is None else question.at
    epochs = [e for e in result.epochs if e.epoch <= until and question.score in e.scores]
    windows = [epochs[i : i + WINDOW] for i in range(len(epochs) - WINDOW + 1)]
    complete = [window for window in windows if window[-1].epoch - window[0].epoch == WINDOW - 1]
    found = [_about_line([e.scores[question.score] for e in window]) for window in complete if not _decays(window)]
    return float(np.mean(found)) if found else None


def _decays(window: Sequence[Epoch]) -> bool:
    """Whether the learning rate falls by half or more within a window."""
    rates = [epoch.learning_rate for epoch in window]
    return any(b is not None and a is not None and 2 * b <= a for a, b in pairwise(rates))


def _about_line(values: Sequence[float]) -> float:
    """Return the standard deviation about the line of least squares."""
    time = np.arange(WINDOW) - (WINDOW - 1) / 2
    centred = np.asarray(values) - np.mean(values)
    residual = centred - (centred @ time) / (time @ time) * time
    return float(np.sqrt((residual**2).sum() / (WINDOW - 2)))


def epochs_to(result: Result, question: Question) -> float | None:
    """First epoch with a median accuracy of at least `threshold`, infinity if none has one; lower is better.

    The median is over the epoch and the two before and after it, so that a lucky epoch does not count.
    """
    if question.threshold is None:
        return None
    known = {e.epoch: e.scores[question.score] for e in result.epochs if question.score in e.scores}
    for epoch in sorted(known):
        window = [known[near] for near in range(epoch - WINDOW // 2, epoch + WINDOW // 2 + 1) if near in known]
        if np.median(window) >= question.threshold:
            return float(epoch)
    return math.inf


def _measured(key: str, description: str) -> Metric:
    def metric(result: Result, question: Question) -> float | None:
        return result.measured.get(key)

    metric.__doc__ = description
    return metric


METRICS: Catalogue[Metric] = Catalogue(
    "metric",
    {
        "accuracy": accuracy,
        "mean-accuracy": mean_accuracy,
        "window-accuracy": window_accuracy,
        "test": on_test,
        "clean": clean,
        "robust": robust,
        "stability": stability,
        "epochs-to": epochs_to,
        **{name: _measured(key, description) for name, (key, description) in MEASURED.items()},
    },
)
"""What a claim can be about. A metric takes a result and a `Question`, and is `None` if the result lacks it."""
