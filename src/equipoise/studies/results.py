"""The results of studies: what they are, and how they are written. `reading` reads them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.files import write_whole
from equipoise.training.meter import learned_nothing
from equipoise.training.run_folder import strict

VERSION = 2
DIGITS = 6  # significant digits of the floats in a file


@dataclass(frozen=True)
class Epoch:
    """What the page and the comparisons need of one line of metrics.jsonl. seconds and passes are totals so far.

    scores: accuracy by score (plain, reestimated, averaged), on the images of `split`. passes: over batches, by kind
    (forward, backward, attack). correction: c, c_hat, weight, variance_left, ... as the correction reports them.
    measured: what `equipoise.analysis` found at the end of this epoch, where it looked.
    """

    epoch: int
    step: int
    scores: Mapping[str, float]
    passes: Mapping[str, float]
    seconds: float | None
    correction: Mapping[str, float]
    split: str = "test"
    train_loss: float | None = None
    density: float | None = None
    exploration: float | None = None
    peak_memory: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None


@dataclass(frozen=True)
class Result:
    """One arm with one seed.

    test: accuracy by score at the end, on test images. layers: (weights, active) by name. robust: by score, `clean` and
    `robust` accuracy under the attack. measured: what `equipoise.analysis` found on the final weights. diverged: why
    there is no end, where a loss or a gradient was not finite.
    """

    arm: str
    seed: int
    epochs: tuple[Epoch, ...]
    finished: bool = True
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    robust: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    diverged: str = ""

    @property
    def stuck(self) -> bool:
        """Whether it learned nothing; a run without losses is not suspected."""
        return learned_nothing([epoch.train_loss for epoch in self.epochs if epoch.train_loss is not None])


@dataclass(frozen=True)
class Claim:
    """What the paper says, as a comparison of two arms. at: an epoch; None is the last.

    margin: by how much the first may be worse, in the metric's own unit, where the claim is that nothing is lost.
    """

    says: str
    better: str
    than: str
    metric: str = "accuracy"
    at: int | None = None
    score: str = "plain"
    threshold: float | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper, to stand beside ours. what: a metric. at: an epoch; None is the last."""

    arm: str
    what: str
    value: float
    at: int | None = None
    score: str = "plain"
    threshold: float | None = None


@dataclass(frozen=True)
class Study:
    """What was asked and what there is of it.

    shows: tables and figures of the paper. results: by arm, in the order of the study, sorted by seed. diverged: by
    arm those that came to no end, which are not among the results. budgets: arms that are another arm with another
    number of epochs, and which one that is.
    """

    name: str
    title: str
    about: str
    results: Mapping[str, tuple[Result, ...]]
    claims: tuple[Claim, ...] = ()
    paper: tuple[PaperValue, ...] = ()
    shows: tuple[str, ...] = ()
    diverged: Mapping[str, tuple[Result, ...]] = field(default_factory=dict)
    budgets: Mapping[str, str] = field(default_factory=dict)

    @property
    def stuck(self) -> tuple[Result, ...]:
        """The finished runs that learned nothing: a comparison with one says little about its method."""
        return tuple(result for results in self.results.values() for result in results if result.stuck)


@dataclass(frozen=True)
class Reading:
    """The studies of a folder, and one line for each thing in it that could not be used."""

    studies: tuple[Study, ...]
    problems: tuple[str, ...]


# Writing


def write_result(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result or study file, whole or not at all: strict JSON, floats of 6 digits, one line an epoch.

    A file that is there already stays: several processes may begin the same study, and say the same of it.
    """
    content = _dump(rounded(strict(value))).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)


def _dump(value: Mapping[str, Any]) -> str:
    """A line for each key and for each item of a list, so that diffs are readable and files small."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_dump_item(item)}" for key, item in value.items()) + "\n}\n"


def _dump_item(item: Any) -> str:
    if isinstance(item, list) and item:
        return "[\n" + ",\n".join("  " + json.dumps(entry, allow_nan=False) for entry in item) + "\n]"
    return json.dumps(item, allow_nan=False)


def rounded(value: Any) -> Any:
    """The same with every float rounded to 6 significant digits."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def slug(name: str) -> str:
    """A file name of [a-z0-9-] for any name; where that loses more than spaces, a digest tells two names apart."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    if plain and plain == re.sub(r"[ _-]+", "-", name.lower()):
        return plain
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{plain}-{digest}" if plain else digest


def result_file(folder: Path, arm: str, seed: int) -> Path:
    """Where the result of an arm and a seed stands in the folder of its study."""
    return folder / f"{slug(arm)}-seed{seed}.json"
