"""The results of studies as dataclasses, and their files. `reading` reads the files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.training.meter import learned_nothing
from equipoise.training.run_folder import strict

VERSION = 2
DIGITS = 6  # significant digits of the floats in a file


@dataclass(frozen=True)
class Epoch:
    """One epoch of a run, from a line of metrics.jsonl.

    Attributes:
        epoch: The number of the epoch, from 1.
        step: Optimizer steps so far.
        scores: Accuracy by score (see `ALL_SCORES`) on the images of `split`.
        passes: Passes over batches so far, by kind: forward, backward, attack.
        seconds: Training time so far; `None` if unknown.
        correction: What the correction reports: c, c_hat, weight, variance_left, ...
        measured: What `equipoise.analysis` measured at the end of this epoch.
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

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.step < 1:
            raise UserError(f"epoch={self.epoch}, step={self.step}: both count from 1")
        for score, accuracy in self.scores.items():
            if not 0 <= accuracy <= 1:
                raise UserError(f"scores.{score}={accuracy}: an accuracy is between 0 and 1")


@dataclass(frozen=True)
class Result:
    """One arm with one seed.

    Attributes:
        test: Accuracy by score on the test images at the end.
        layers: Number of weights and of active weights, by layer.
        robust: By score, the `clean` accuracy and the `robust` accuracy under attack.
        measured: What `equipoise.analysis` measured at the final weights.
        diverged: The reason if a loss or gradient was not finite, else empty.
        spent: Seconds of training and start-up, also if they cannot be compared; `None` if unknown.
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
    spent: float | None = None

    @property
    def stuck(self) -> bool:
        """Whether the run learned nothing; False if its losses are unknown."""
        return learned_nothing([epoch.train_loss for epoch in self.epochs if epoch.train_loss is not None])


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which number of a result is meant.

    Attributes:
        metric: A name in `METRICS`.
        at: The epoch; `None` for the last one.
        score: A name in `ALL_SCORES`.
        threshold: The accuracy that `epochs-to` waits for.
    """

    metric: str = "accuracy"
    at: int | None = None
    score: str = "plain"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.at is not None and self.at < 1:
            raise UserError(f"at={self.at}: epochs count from 1")


@dataclass(frozen=True)
class Claim(Question):
    """A statement of the paper, or a control, as a comparison of two arms.

    Attributes:
        says: The statement in words.
        better: The arm that is said to be better.
        than: The arm that it is compared with.
        margin: By how much `better` may be worse, in the unit of the metric, for claims that nothing is lost.
    """

    says: str
    better: str
    than: str
    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin < 0:
            raise UserError(f"margin={self.margin}: how much worse counts as equal, at least 0")

    @property
    def is_control(self) -> bool:
        """Whether the claim is ours: does something simpler explain the gain?"""
        return self.says.startswith("Control")


@dataclass(frozen=True)
class PaperValue(Question):
    """A number that the paper reports for an arm."""

    arm: str
    value: float


@dataclass(frozen=True)
class Study:
    """A study with its results.

    Attributes:
        results: Finished runs by arm, in the order of the study, sorted by seed.
        shows: The tables and figures of the paper that the study is about.
        diverged: Runs that diverged, by arm. They are not among the results.
        budgets: Arms that repeat another arm with another number of epochs, and that arm.
        images: What the images are, for readers, such as `CIFAR-10 as AVIF q95`; empty if unknown.
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
    images: str = ""

    @property
    def stuck(self) -> tuple[Result, ...]:
        """The finished runs that learned nothing. A comparison with one says little about its method."""
        return tuple(result for results in self.results.values() for result in results if result.stuck)


@dataclass(frozen=True)
class Reading:
    """The studies of a folder, and one line for each file or part of a file that could not be used."""

    studies: tuple[Study, ...]
    problems: tuple[str, ...]


# Writing


def write_result(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result or study file: strict JSON, floats with 6 digits, one line per epoch.

    The file is written whole or not at all. A file with the same content is left alone, because several processes may
    start the same study.
    """
    content = _dump(rounded(strict(value))).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)


def _dump(value: Mapping[str, Any]) -> str:
    """Format with one line per key and per list item, so that diffs are readable and files small."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_dump_item(item)}" for key, item in value.items()) + "\n}\n"


def _dump_item(item: Any) -> str:
    if isinstance(item, list) and item:
        return "[\n" + ",\n".join("  " + json.dumps(entry, allow_nan=False) for entry in item) + "\n]"
    return json.dumps(item, allow_nan=False)


def rounded(value: Any) -> Any:
    """Round every float in nested values to 6 significant digits."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def slug(name: str) -> str:
    """Return a file name of [a-z0-9-] for any name.

    A digest is appended if more than spaces and case are lost, so that two names never share a file.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    if plain and plain == re.sub(r"[ _-]+", "-", name.lower()):
        return plain
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{plain}-{digest}" if plain else digest


def result_file(folder: Path, arm: str, seed: int) -> Path:
    """Return the path of the result of an arm and a seed in the folder of its study."""
    return folder / f"{slug(arm)}-seed{seed}.json"
